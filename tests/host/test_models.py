"""The shipped models have the published tensors, come up quickly and are repeatable."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import transformers

from bench.host import models
from bench.host.estimate import payload_bytes
from bench.plan import MODELS, Case, Options

SMALL_PHI3 = {
    "model_type": "phi3", "hidden_size": 48, "intermediate_size": 64, "num_attention_heads": 4,
    "num_hidden_layers": 2, "num_key_value_heads": 4, "vocab_size": 300, "pad_token_id": 0,
    "max_position_embeddings": 4096, "original_max_position_embeddings": 4096,
}  # fmt: skip
SMALL_CLIP = {
    "model_type": "clip_vision_model", "hidden_size": 32, "image_size": 56, "intermediate_size": 64,
    "num_attention_heads": 4, "num_hidden_layers": 3, "patch_size": 14,
}  # fmt: skip
SMALL_LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
    "num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 500,
    "tie_word_embeddings": True, "rope_theta": 500000.0, "max_position_embeddings": 131072,
    "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                     "original_max_position_embeddings": 8192, "rope_type": "llama3"},
}  # fmt: skip


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch):
    """Shrinks a shipped model to a config of the same family."""

    def shrink(name: str, config: dict, vision: dict | None = None) -> None:
        shipped = dict(models._shipped(name), config=config)
        if vision:
            shipped["vision_config"] = vision
        monkeypatch.setattr(models, "_shipped", lambda _: shipped)

    return shrink


@pytest.mark.parametrize("name", MODELS)
def test_every_model_has_the_published_number_of_parameters(name: str) -> None:
    skeleton = models._skeleton(name)
    assert sum(parameter.numel() for parameter in skeleton.parameters()) == models.parameter_count(name)
    allocated = sum(parameter.numel() for parameter in skeleton.parameters() if not parameter.is_meta)
    assert allocated < models.parameter_count(name) / 1000


def test_known_published_counts() -> None:
    counts = {name: models.parameter_count(name) for name in MODELS}
    assert counts["phi3"] == 3_821_079_552
    assert counts["gpt2-large"] == 774_030_080
    assert counts["llama3-1B"] == 1_235_814_400
    assert counts["phi3-v"] == 4_146_621_440


@pytest.mark.parametrize("optimizer", [False, True])
@pytest.mark.parametrize("half", [False, True])
def test_announced_bytes_are_the_bytes_of_the_tensors(half: bool, optimizer: bool) -> None:
    model = models.build_model("tiny-t5", 1, torch.float16 if half else torch.float32)
    tensors = list(model.parameters())
    if optimizer:
        state = models.make_optimizer(model, fused=False, seed=2).state
        tensors += [moment for entry in state.values() for moment in (entry["exp_avg"], entry["exp_avg_sq"])]
    real = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    options = Options(model="tiny-t5", half=half, optimizer=optimizer, gpu=half)
    assert payload_bytes(Case(workload="model", writer="direct", options=options)) == real


def test_same_seed_same_model_and_another_seed_another() -> None:
    one, again, other = (models.build_model("tiny-t5", seed) for seed in (1, 1, 2))
    inputs = models.model_inputs(one, 5)
    answer = models.logits(one, inputs)
    assert torch.isfinite(answer).all()
    assert answer.unique().numel() > 1000
    assert torch.equal(answer, models.logits(again, inputs))
    assert not torch.equal(answer, models.logits(other, inputs))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_answers_are_finite_and_not_all_alike(dtype: torch.dtype) -> None:
    model = models.build_model("tiny-t5", 1, dtype)
    answer = models.logits(model, models.model_inputs(model, 5))
    assert answer.dtype == dtype
    assert torch.isfinite(answer).all()
    assert answer.unique().numel() > 50


def test_tied_weights_stay_one_tensor(small) -> None:
    small("llama3-1B", SMALL_LLAMA)
    model = models.build_model("llama3-1B", 1)
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize(
    ("name", "config"),
    [("llama3-1B", SMALL_LLAMA), ("phi3", SMALL_PHI3), ("gpt2-large", {"model_type": "gpt2", "n_embd": 32,
      "n_head": 4, "n_layer": 2, "vocab_size": 100})],
)  # fmt: skip
def test_buffers_and_answers_are_those_of_an_ordinarily_built_model(small, name: str, config: dict) -> None:
    small(name, config)
    quick = models.build_model(name, 1)
    architecture = models._shipped(name)["architecture"]
    ordinary = getattr(transformers, architecture)(transformers.AutoConfig.for_model(**config)).eval()
    buffers = dict(ordinary.named_buffers())
    assert buffers.keys() == dict(quick.named_buffers()).keys()
    for key, buffer in quick.named_buffers():
        assert torch.equal(buffer, buffers[key]), key
    ordinary.load_state_dict(quick.state_dict())
    inputs = models.model_inputs(quick, 3)
    assert torch.equal(models.logits(quick, inputs), models.logits(ordinary, inputs))


def test_vision_model_answers_to_its_image(small) -> None:
    small("phi3-v", SMALL_PHI3, SMALL_CLIP)
    model = models.build_model("phi3-v", 1)
    inputs = models.model_inputs(model, 3)
    answer = models.logits(model, inputs)
    # 2 x 2 merged patches of a 4 x 4 grid: two lines of two, each with a separator, and one for the image.
    assert answer.shape == (2, 2 * 3 + 1 + 16, 300)
    assert torch.isfinite(answer).all()
    inputs["pixel_values"] = inputs["pixel_values"].flip(3)
    assert not torch.equal(answer, models.logits(model, inputs))


def test_unknown_model_names_the_known_ones() -> None:
    with pytest.raises(models.ModelError, match="unknown model 'phi4'; known: tiny-t5, gpt2-large"):
        models.build_model("phi4", 1)


def test_pretrained_folder_is_loaded_with_its_own_weights(tmp_path: Path) -> None:
    saved = models.build_model("tiny-t5", 7)
    copy.deepcopy(saved).save_pretrained(tmp_path)
    loaded = models.build_model("phi3", 1, torch.bfloat16, pretrained=str(tmp_path))
    assert loaded.dtype == torch.bfloat16
    assert torch.equal(loaded.shared.weight, saved.shared.weight.bfloat16())


@pytest.mark.parametrize("content", [None, "{", "{}"])
def test_pretrained_that_cannot_be_loaded_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(models.ModelError, match=r"cannot load the pretrained model '.*leave out --pretrained"):
        models.build_model("tiny-t5", 1, pretrained=str(tmp_path))


def test_optimizer_of_a_model_holds_random_moments_for_every_parameter() -> None:
    model = models.build_model("tiny-t5", 1)
    optimizer = models.make_optimizer(model, fused=False, seed=2)
    state = optimizer.state_dict()["state"]
    assert len(state) == len(list(model.parameters()))
    moments = [entry[key] for entry in state.values() for key in ("exp_avg", "exp_avg_sq")]
    assert all(moment.unique().numel() > moment.numel() // 2 for moment in moments)
    assert len({moment.flatten()[:8].numpy().tobytes() for moment in moments}) == len(moments)
