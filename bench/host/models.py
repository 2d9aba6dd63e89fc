"""The published models, built from configs that ship with this package: same tensors, random weights, no download.

A config file names the published model, its class and its published parameter count. Rotary
position scaling of phi-3.5 is left out: it holds no parameter and no checkpointed buffer.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.host.randomness import RandomBytes, fill_weights_
from bench.plan import MODELS

if TYPE_CHECKING:
    import torch

_FOLDER = Path(__file__).resolve().parent / "model_configs"
_TOKENS = 16


class ModelError(ValueError):
    """A model that can't be built or loaded; the message says why and what would be right."""


def build_model(
    name: str,
    seed: int,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    pretrained: str | None = None,
) -> torch.nn.Module:
    """A model in evaluation mode with random weights from ``seed``, on ``device``.

    ``dtype`` is that of the parameters (None: float32). ``pretrained``, a hub name or a folder, is
    loaded in place of building ``name``; then the weights are its own. Raises ModelError.
    """
    import torch

    dtype = dtype or torch.float32
    if pretrained is not None:
        return _load_pretrained(pretrained).to(device=device, dtype=dtype).eval()
    model = _skeleton(name)
    _materialise_(model, dtype, torch.device(device))
    return fill_weights_(model, seed).eval()


def parameter_count(name: str) -> int:
    """The number of parameters of a shipped model, tied ones counted once, as published."""
    return int(_shipped(name)["parameters"])


def model_inputs(model: torch.nn.Module, seed: int) -> dict[str, torch.Tensor]:
    """Small inputs, repeatable for a seed, that reach every part of the model; on the model's device and dtype."""
    import torch

    config: Any = model.config
    first = next(model.parameters())
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, config.vocab_size, (2, _TOKENS), generator=generator).to(first.device)
    inputs = {"input_ids": tokens}
    if getattr(config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = tokens.flip(1)
    vision = getattr(model, "vision", None)
    if vision is not None:
        side = vision.config.image_size
        pixels = torch.rand(2, 3, side, side, generator=generator)
        inputs["pixel_values"] = pixels.to(device=first.device, dtype=first.dtype)
    return inputs


def logits(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """What the model answers, for comparing two states of it bit by bit."""
    import torch

    with torch.inference_mode():
        return model(**inputs, use_cache=False).logits


def make_optimizer(model: torch.nn.Module, fused: bool, seed: int) -> torch.optim.Optimizer:
    """An Adam optimizer whose state holds random moments, so that a checkpoint has its full size.

    ``fused`` takes DeepSpeed's FusedAdam, a CUDA op that is compiled at first use; else torch's AdamW.
    Raises ModelError when the op can't be built.
    """
    import torch

    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer: torch.optim.Optimizer
    if fused:
        from deepspeed.ops.adam import FusedAdam

        try:
            optimizer = FusedAdam(parameters)
        except Exception as error:
            raise ModelError(
                f"DeepSpeed's fused Adam can't be built or loaded here: {error}; leave out --fused, or install "
                "the CUDA toolkit that torch was built with"
            ) from error
    else:
        optimizer = torch.optim.AdamW(parameters)
    fill_optimizer_(optimizer, seed)
    return optimizer


def fill_optimizer_(optimizer: torch.optim.Optimizer, seed: int, parameters: list[torch.Tensor] | None = None) -> None:
    """Give an Adam-like optimizer random moments, making those that no step has made yet.

    ``parameters``: what the state is for, where the optimizer's groups do not hold them (ZeRO 3).
    For checkpoints only: second moments may be negative, so no step may follow.
    """
    import torch

    # DeepSpeed's fused Adam counts steps once a group, torch's once a parameter.
    step_in_group = type(optimizer).__name__ == "FusedAdam"
    streams: dict[torch.device, RandomBytes] = {}
    if step_in_group:
        for group in optimizer.param_groups:
            group.setdefault("step", 1)
    for parameter in parameters or [one for group in optimizer.param_groups for one in group["params"]]:
        state = optimizer.state[parameter]
        if "exp_avg" not in state:
            if not step_in_group:
                state["step"] = torch.tensor(1.0)
            state["exp_avg"] = torch.empty_like(parameter, requires_grad=False)
            state["exp_avg_sq"] = torch.empty_like(parameter, requires_grad=False)
        for moment in (state["exp_avg"], state["exp_avg_sq"]):
            if moment.device not in streams:
                streams[moment.device] = RandomBytes(seed, moment.device)
            streams[moment.device].fill_weights_(moment)


@cache
def _shipped(name: str) -> dict[str, Any]:
    if name not in MODELS:
        raise ModelError(f"unknown model {name!r}; known: {', '.join(MODELS)}")
    return json.loads((_FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def _skeleton(name: str) -> torch.nn.Module:
    """The model with its large parameters on the meta device: nothing is allocated or initialised for them."""
    import transformers

    shipped = _shipped(name)
    config = transformers.AutoConfig.for_model(**shipped["config"])
    with _empty_on_meta():
        if "vision_config" in shipped:
            vision = transformers.AutoConfig.for_model(**shipped["vision_config"])
            return _phi3_vision(config, vision)
        return getattr(transformers, shipped["architecture"])(config)


def _materialise_(model: torch.nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Give every parameter memory on ``device``, leaving tied ones tied, and move the buffers, which are real."""
    import torch

    made: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in made:
                made[id(parameter)] = torch.nn.Parameter(
                    torch.empty(parameter.shape, dtype=dtype, device=device), requires_grad=parameter.requires_grad
                )
            module._parameters[key] = made[id(parameter)]
        for key, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[key] = buffer.to(device)


def _empty_on_meta() -> Any:
    """A mode in which ``torch.empty`` allocates nothing.

    Layers take their parameters from ``torch.empty``; buffers (rotary frequencies, masks, positions)
    are computed, so they come out real and right, which they would not on the meta device.
    """
    import torch
    from torch.overrides import TorchFunctionMode

    class EmptyOnMeta(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = dict(kwargs or {})
            if func is torch.empty and kwargs.get("device") is None:
                kwargs["device"] = "meta"
            return func(*args, **kwargs)

    return EmptyOnMeta()


def _phi3_vision(config: Any, vision_config: Any) -> torch.nn.Module:
    """phi-3.5-vision from native parts; transformers has no such class.

    Phi3 as the language model, CLIP ViT-L/14-336 as the eye, the published two-layer projection of
    2 x 2 merged patches and its two separators: the published parameter count, tensor for tensor.
    One image a sequence, without the published cropping of large images.
    """
    import torch
    from torch import nn
    from transformers import CLIPVisionModel, Phi3ForCausalLM

    class Phi3Vision(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            merged = 4 * vision_config.hidden_size
            self.config = config
            self.language = Phi3ForCausalLM(config)
            self.vision = CLIPVisionModel(vision_config)
            self.projection = nn.Sequential(
                nn.Linear(merged, config.hidden_size), nn.GELU(), nn.Linear(config.hidden_size, config.hidden_size)
            )
            self.line_separator = nn.Parameter(torch.empty(1, 1, 1, merged))
            self.image_separator = nn.Parameter(torch.empty(1, 1, merged))

        def forward(self, input_ids: torch.Tensor, pixel_values: torch.Tensor, use_cache: bool = False) -> Any:
            seen = self.vision(pixel_values, output_hidden_states=True).hidden_states[-2][:, 1:]
            count, patches, width = seen.shape
            side = int(patches**0.5)
            grid = seen.reshape(count, side // 2, 2, side // 2, 2, width).permute(0, 1, 3, 2, 4, 5)
            grid = grid.reshape(count, side // 2, side // 2, 4 * width)
            lines = torch.cat([grid, self.line_separator.expand(count, side // 2, 1, -1)], dim=2).flatten(1, 2)
            image = self.projection(torch.cat([lines, self.image_separator.expand(count, 1, -1)], dim=1))
            words = self.language.get_input_embeddings()(input_ids)
            return self.language(inputs_embeds=torch.cat([image, words], dim=1), use_cache=use_cache)

    return Phi3Vision()


def _load_pretrained(source: str) -> torch.nn.Module:
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(source)
        names = getattr(config, "architectures", None) or []
        classes = [getattr(transformers, name) for name in names if hasattr(transformers, name)]
        kind = classes[0] if classes else transformers.AutoModel
        return kind.from_pretrained(source)
    except (OSError, ValueError, KeyError) as error:
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"cannot load the pretrained model {source!r}: {first_line} Give a folder that holds its config.json "
            "and weights, a hub name that this host can reach, or leave out --pretrained for random weights"
        ) from error
