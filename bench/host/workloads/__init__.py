"""What is saved: a raw tensor, a model, a DeepSpeed engine, a round trip."""
