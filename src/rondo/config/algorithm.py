"""What is optimised: the objective and its parts."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from rondo.config.section import Section


class KLConfig(Section):
    coefficient: float = Field(default=0.0, ge=0, description="Weight of the KL; 0: no reference model is loaded.")
    estimator: Literal["k1", "k2", "k3"] = Field(
        default="k3", description="k1: log-ratio, k2: half its square, k3: r-1-log r."
    )
    place: Literal["loss", "reward"] = Field(
        default="loss", description="A term of the loss per token, or taken from each response's reward as its sum."
    )


# What a paper sets otherwise than the defaults below, which are GRPO's; what the user sets goes before either.
PAPERS: dict[str, dict[str, Any]] = {
    "dr-grpo": {"scale_advantages": False, "normalise": "constant"},
    "dapo": {"clip_high": 0.28, "normalise": "tokens", "overlong_buffer": 0.2, "filter": "nonzero-spread"},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4},
    "rloo": {"scale_advantages": False, "kl": {"place": "reward", "estimator": "k1"}},
    "reinforce++": {"kl": {"estimator": "k2"}},
    "cispo": {"clip_low": 1.0, "clip_high": 4.0, "normalise": "tokens"},
}


class AlgorithmConfig(Section):
    name: Literal["grpo", "dr-grpo", "dapo", "gspo", "rloo", "reinforce++", "cispo"] = Field(
        default="grpo", description="The objective; it brings its paper's defaults for the keys below."
    )
    clip: float | None = Field(default=None, gt=0, description="Sets clip_low and clip_high at once.")
    clip_low: float = Field(default=0.2, gt=0, description="The ratio is clipped to 1 - clip_low ..")
    clip_high: float = Field(default=0.2, gt=0, description=".. 1 + clip_high.")
    scale_advantages: bool = Field(
        default=True, description="Divide advantages by their rewards' deviation (of the group; reinforce++: period)."
    )
    normalise: Literal["sequences", "tokens", "constant"] = Field(
        default="sequences",
        description="What the summed loss is divided by: each response's own length and then the number of "
        "responses, the number of tokens, or responses x max_new_tokens.",
    )
    overlong_buffer: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="The last share of max_new_tokens, in which a reward loses up to 1; 0: length costs nothing.",
    )
    entropy_coefficient: float = Field(default=0.0, ge=0, description="Weight of the policy's entropy, as a bonus.")
    correction_cap: float = Field(
        default=0.0, ge=0, description="Weigh tokens by trainer / engine probability, at most this; 0: do not."
    )
    filter: Literal["none", "nonzero-spread"] = Field(
        default="none", description="nonzero-spread: train the period's first groups whose rewards are not all equal."
    )
    oversample: float = Field(
        default=1.5, ge=1, description="With a filter: ask for so many times prompts_per_period groups at first."
    )
    max_candidates: int = Field(
        default=0, ge=0, description="With a filter: groups to try per period; 0: ten times prompts_per_period."
    )
    kl: KLConfig = KLConfig()

    @model_validator(mode="before")
    @classmethod
    def _as_in_the_paper(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        paper = dict(PAPERS.get(str(given.get("name")), {}))
        if given.get("clip") is not None:
            paper |= {"clip_low": given["clip"], "clip_high": given["clip"]}
        if isinstance(given.get("kl"), dict):
            given = {**given, "kl": {**paper.get("kl", {}), **given["kl"]}}
        return {**paper, **given}

    @model_validator(mode="after")
    def _estimable(self) -> AlgorithmConfig:
        if self.name == "rloo" and self.scale_advantages:
            raise ValueError(
                'algorithm.name = "rloo" leaves rewards unscaled: unset algorithm.scale_advantages, '
                'or set algorithm.name = "grpo"'
            )
        if self.name == "reinforce++" and self.kl.coefficient and self.kl.place == "reward":
            raise ValueError(
                'algorithm.kl.place = "reward" cannot be exact with algorithm.name = "reinforce++", whose whitening '
                'needs the penalties of the whole period first: set algorithm.kl.place = "loss"'
            )
        return self
