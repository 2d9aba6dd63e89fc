"""Runs on the controller: inventory, SSH, watching, collecting, verdicts. Never imports torch."""
