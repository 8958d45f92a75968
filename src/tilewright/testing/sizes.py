"""Sizes as they occur: widths and heads of published models, and lengths that are drawn."""

import random
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import torch

Choice = TypeVar("Choice")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


class Model(NamedTuple):
    """What a published config says. inter: columns of the MLP inside."""

    hidden: int
    inter: int
    q_heads: int
    kv_heads: int
    head_dim: int
    vocab: int


class Experts(NamedTuple):
    """A published mixture of experts. inter: columns of one expert inside."""

    top_k: int
    experts: int
    hidden: int
    inter: int


MODELS = (
    Model(576, 1536, 9, 3, 64, 49_152),  # SmolLM2-135M
    Model(896, 4864, 14, 2, 64, 151_936),  # Qwen2.5-0.5B
    Model(1152, 6912, 4, 1, 256, 262_144),  # Gemma-3-1B
    Model(1536, 8960, 12, 2, 128, 151_936),  # Qwen2.5-1.5B
    Model(2048, 8192, 32, 8, 64, 128_256),  # Llama-3.2-1B
    Model(2048, 8192, 32, 32, 64, 49_152),  # SmolLM2-1.7B
    Model(2304, 9216, 8, 4, 256, 256_000),  # Gemma-2-2B
    Model(2560, 9728, 32, 8, 128, 151_936),  # Qwen3-4B
    Model(2560, 10_240, 32, 32, 80, 51_200),  # Phi-2
    Model(2880, 2880, 64, 8, 64, 201_088),  # gpt-oss-20b
    Model(3072, 8192, 24, 8, 128, 128_256),  # Llama-3.2-3B
    Model(3072, 8192, 32, 32, 96, 32_064),  # Phi-3-mini
    Model(3072, 23_040, 12, 4, 256, 131_072),  # Falcon3-10B
    Model(3584, 14_336, 16, 8, 256, 256_000),  # Gemma-2-9B
    Model(3584, 18_944, 28, 4, 128, 152_064),  # Qwen2-7B
    Model(3840, 15_360, 16, 8, 256, 262_144),  # Gemma-3-12B
    Model(4096, 12_288, 32, 8, 128, 151_936),  # Qwen3-8B
    Model(4096, 13_696, 32, 2, 128, 151_552),  # GLM-4-9B
    Model(4096, 14_336, 32, 8, 128, 128_256),  # Llama-3.1-8B
    Model(4608, 36_864, 32, 16, 128, 256_000),  # Gemma-2-27B
    Model(5120, 13_824, 40, 8, 128, 152_064),  # Qwen2.5-14B
    Model(5120, 17_408, 40, 8, 128, 151_936),  # Qwen3-14B
    Model(5120, 17_920, 40, 10, 128, 100_352),  # Phi-4
    Model(5120, 25_600, 64, 8, 128, 151_936),  # Qwen3-32B
    Model(5120, 32_768, 32, 8, 128, 131_072),  # Mistral-Small-3.1-24B
    Model(5376, 21_504, 32, 16, 128, 262_144),  # Gemma-3-27B
    Model(6144, 16_384, 48, 8, 128, 92_544),  # InternLM2-20B
    Model(6144, 24_576, 48, 4, 128, 49_152),  # StarCoder2-15B
    Model(7168, 18_432, 128, 128, 128, 129_280),  # DeepSeek-V3
    Model(7168, 20_480, 56, 8, 128, 64_000),  # Yi-34B
    Model(8192, 28_672, 64, 8, 128, 128_256),  # Llama-3.1-70B
    Model(8192, 29_568, 64, 8, 128, 152_064),  # Qwen2.5-72B
    Model(8192, 32_768, 128, 8, 64, 65_024),  # Falcon-40B
    Model(12_288, 28_672, 96, 8, 128, 32_768),  # Mistral-Large-2
    Model(16_384, 53_248, 128, 8, 128, 128_256),  # Llama-3.1-405B
)
EXPERTS = (
    Experts(8, 40, 1536, 512),  # Granite-3-3B-A800M
    Experts(8, 64, 2048, 1024),  # OLMoE-1B-7B
    Experts(4, 60, 2048, 1408),  # Qwen1.5-MoE-A2.7B
    Experts(6, 64, 2048, 1408),  # DeepSeek-V2-Lite
    Experts(8, 128, 2048, 768),  # Qwen3-30B-A3B
    Experts(4, 32, 2880, 2880),  # gpt-oss-20b
    Experts(2, 16, 4096, 6400),  # Phi-3.5-MoE
    Experts(2, 8, 4096, 14_336),  # Mixtral-8x7B
    Experts(8, 64, 4096, 3072),  # Hunyuan-A13B
    Experts(8, 128, 4096, 1408),  # GLM-4.5-Air
    Experts(8, 128, 4096, 1536),  # Qwen3-235B-A22B
    Experts(6, 160, 5120, 1536),  # DeepSeek-V2
    Experts(1, 16, 5120, 8192),  # Llama-4-Scout
    Experts(4, 16, 6144, 10_752),  # DBRX
    Experts(8, 256, 7168, 2048),  # DeepSeek-V3
)
LARGE = 1 << 24  # elements
NORMED = (768, 1024, 1280, 1600, 2560, 3072, 4096, 4544, 5120, 6144, 7168, 8192, 12_288)  # widths of models with layer norms: GPT-2, Whisper, Falcon


class Sizes(random.Random):
    """A source of sizes; one seed gives one sequence, whatever is drawn elsewhere."""

    def model(self) -> Model:
        return self.choice(MODELS)

    def odds(self, share: float) -> bool:
        """True in this share of the draws."""
        return self.random() < share

    def log(self, low: int, high: int, multiple: int = 1) -> int:
        """An integer from low to high, evenly in its logarithm; a multiple of one."""
        drawn: float = low * (high / low) ** self.random()
        return max(multiple, multiple * round(drawn / multiple))

    def rows(self, most: int) -> int:
        """Tokens of a step: of a few users or of prompts.

        A fifth are powers of two, as schedulers pad.
        """
        drawn = self.log(1, most)
        return 1 << (drawn.bit_length() - 1) if self.odds(0.2) else drawn

    def large_rows(self, cols: int) -> int:
        """So many rows of these columns that they come from memory."""
        return self.log(max(1, LARGE // cols), 8 * LARGE // cols)

    def width(self, usual: Sequence[int]) -> int:
        """Columns: of a published model, in a tenth of the draws any number, odd ones too."""
        return self.log(96, 20_000) if self.odds(0.1) else self.choice(usual)

    def hidden(self) -> int:
        return self.width([model.hidden for model in MODELS])

    def inter(self) -> int:
        """Columns of an MLP inside, of which several GPUs may share one."""
        return self.width([model.inter // share for model in MODELS for share in (1, 1, 2, 4)])

    def dtype(self) -> torch.dtype:
        """Mostly bf16."""
        return FP16 if self.odds(0.15) else BF16

    def linear(self, multiple: int = 8) -> tuple[int, int]:
        """(n, k) of a linear layer, whole or a GPU's share; in a tenth of the draws any.

        Both are multiples of `multiple`.
        """
        if self.odds(0.1):
            return self.log(256, 32_768, multiple), self.log(256, 16_384, multiple)
        while True:
            m, share = self.model(), self.choice((1, 1, 1, 2, 4, 8))
            q, kv = m.q_heads * m.head_dim, m.kv_heads * m.head_dim
            columns = ((q + 2 * kv) // share, m.hidden), (2 * m.inter // share, m.hidden), (m.inter // share, m.hidden)
            n, k = self.choice((*columns, (m.hidden, q // share), (m.hidden, m.inter // share), (m.hidden, m.inter // share), (m.vocab, m.hidden)))
            if n % multiple == k % multiple == 0:
                return n, k

    def deep_linear(self, multiple: int) -> tuple[int, int]:
        """(n, k) of a layer that sums over 16384 products or more."""
        return self.choice([(m.hidden, m.inter) for m in MODELS if m.inter >= 16_384 and m.inter % multiple == m.hidden % multiple == 0])

    def heads(self, widest: int = 256) -> tuple[int, int, int]:
        """(q_heads, kv_heads, head_dim), whole or a GPU's share."""
        while True:
            m, share = self.model(), self.choice((1, 1, 2, 4, 8))
            if m.kv_heads % share == m.q_heads % share == 0 and m.head_dim <= widest and m.q_heads // m.kv_heads <= 16:
                return m.q_heads // share, m.kv_heads // share, m.head_dim

    def cache(self, most_tokens: int) -> tuple[int, int]:
        """(sequences, keys of each): a decode step."""
        while True:
            batch, keys = self.rows(256), self.log(100, 131_072)
            if batch * keys <= most_tokens:
                return batch, keys

    def prompts(self, most_tokens: int, longest: int) -> tuple[int, int]:
        """(prompts, tokens of each), all of one length."""
        while True:
            batch, tokens = self.rows(16), self.log(40, longest)
            if batch * tokens <= most_tokens:
                return batch, tokens

    def moe(self, most_bytes: int = 3 << 30) -> Experts:
        """A mixture of experts whose 16-bit weights take at most so many bytes.

        Several GPUs may share each expert.
        """
        while True:
            whole, share = self.choice(EXPERTS), self.choice((1, 1, 2, 4, 8))
            if whole.inter % (64 * share) == 0 or share == 1:
                mine = whole._replace(inter=whole.inter // share)
                if 6 * mine.experts * mine.hidden * mine.inter <= most_bytes:
                    return mine

    def one_of(self, weights: dict[Choice, float]) -> Choice:
        return self.choices(list(weights), list(weights.values()))[0]

    def some(self, **share: float) -> dict[str, Any]:
        """Options that are on in a share of the draws: those that are."""
        return {name: True for name, odds in share.items() if self.odds(odds)}
