"""Incompressible data from a recorded seed, made at memory speed.

A base block of :data:`BLOCK_BYTES` comes from torch's own generator; the k-th block of a fill is the
base XOR a 64-bit word drawn from the seed and k (splitmix64, Steele et al., OOPSLA 2014). One pass
over memory, and no two blocks share a run of bytes, so neither compression nor deduplication finds
anything. The same seed gives the same bytes on a CPU and on a GPU.

Weights are random bytes with one bit less: the top bit of the exponent is clear (two bits in
float16), so every value is finite and small while sign, mantissa and most of the exponent stay random.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.host.deepspeed_cpu import cast_to_byte_tensor

if TYPE_CHECKING:
    import torch

BLOCK_BYTES = 4 * 1024**2
_WORD_BITS = 64
_ALL_BITS = (1 << _WORD_BITS) - 1
_GOLDEN = 0x9E3779B97F4A7C15


class RandomBytes:
    """A stream of random bytes on one device: every fill takes blocks that no earlier fill took."""

    def __init__(self, seed: int, device: torch.device | str = "cpu") -> None:
        import torch

        self._seed = seed & _ALL_BITS
        self._taken = 0
        generator = torch.Generator().manual_seed(_mix(self._seed) >> 1)
        words = torch.empty(BLOCK_BYTES // 8, dtype=torch.int64)
        words.random_(-(2**63), None, generator=generator)
        self._base = words.to(device)
        self._masked: dict[int, torch.Tensor] = {_ALL_BITS: self._base}

    def fill_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Random bits in every byte of a tensor of any dtype (bool: 0 or 1). Floats may be NaN or infinite."""
        import torch

        return self._fill(tensor, 0x01 if tensor.dtype == torch.bool else 0xFF, 1)

    def fill_weights_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Finite random values below 2 in magnitude (float16: below 2**-7) in a floating or complex tensor."""
        import torch

        if not (tensor.is_floating_point() or tensor.is_complex()):
            raise ValueError(f"weights are floating point, not {tensor.dtype}")
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        width = real.element_size()
        clear = 1 << (8 * width - 2)
        if real.dtype == torch.float16:
            clear |= clear >> 1
        self._fill(real, ((1 << 8 * width) - 1) & ~clear, width)
        return tensor

    def _fill(self, tensor: torch.Tensor, mask: int, width: int) -> torch.Tensor:
        import torch

        if tensor.numel() == 0:
            return tensor
        flat = cast_to_byte_tensor(tensor.detach()) if tensor.is_contiguous() else None
        if flat is None or flat.data_ptr() % 8:
            fresh = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
            return tensor.detach().copy_(self._fill(fresh, mask, width))
        mask = sum(mask << shift for shift in range(0, _WORD_BITS, 8 * width))
        base = self._masked_base(mask)
        whole = flat.numel() // 8 * 8
        words = flat[:whole].view(torch.int64)
        # One operation for all whole blocks: a thread pool's barrier a block is slow on a busy machine.
        blocks = words.numel() // base.numel()
        if blocks:
            keys = torch.tensor([self._next_word(mask) for _ in range(blocks)], device=base.device)
            grid = words[: blocks * base.numel()].view(blocks, -1)
            torch.bitwise_xor(base.unsqueeze(0), keys.unsqueeze(1), out=grid)
        rest = words[blocks * base.numel() :]
        if rest.numel():
            torch.bitwise_xor(base[: rest.numel()], self._next_word(mask), out=rest)
        if whole < flat.numel():
            last = torch.bitwise_xor(base[:1], self._next_word(mask)).view(torch.uint8)
            flat[whole:] = last[: flat.numel() - whole]
        return tensor

    def _masked_base(self, mask: int) -> torch.Tensor:
        if mask not in self._masked:
            self._masked[mask] = self._base & _signed(mask)
        return self._masked[mask]

    def _next_word(self, mask: int) -> int:
        self._taken += 1
        return _signed(_mix(self._seed + self._taken * _GOLDEN) & mask)


def fill_random_(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    """Fill a tensor of any dtype on any device with random bytes from ``seed``; returns it."""
    return RandomBytes(seed, tensor.device).fill_(tensor)


def fill_weights_(module: torch.nn.Module, seed: int) -> torch.nn.Module:
    """Give every parameter of a module finite random values from ``seed``; tied ones are filled once."""
    streams: dict[torch.device, RandomBytes] = {}
    for parameter in module.parameters():
        if parameter.device not in streams:
            streams[parameter.device] = RandomBytes(seed, parameter.device)
        streams[parameter.device].fill_weights_(parameter.data)
    return module


def _mix(state: int) -> int:
    """One output of splitmix64 for a 64-bit state."""
    state = (state + _GOLDEN) & _ALL_BITS
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _ALL_BITS
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _ALL_BITS
    return state ^ (state >> 31)


def _signed(word: int) -> int:
    return word - (1 << _WORD_BITS) if word >> (_WORD_BITS - 1) else word
