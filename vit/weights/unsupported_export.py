"""Settings that neither timm nor transformers has a network for."""

from dataclasses import fields

from vit.config import ModelConfig

REMEDY = "; --merge-tokens 0 leaves merging out, with slightly other answers"
OURS_ALONE = ("parallel_blocks", "repeat_blocks", "num_kv_heads", "merge_tokens")


def only_ours(config: ModelConfig) -> str | None:
    """The first setting that only our network knows, with its value; None where there is none."""
    defaults = {field.name: field.default for field in fields(ModelConfig)}
    if config.feedforward == "moe":
        return "feedforward=moe"
    changed = (name for name in OURS_ALONE if getattr(config, name) != defaults[name])
    return next((f"{name}={getattr(config, name)}" for name in changed), None)


def remedy(refusal: str) -> str:
    """What can be done about a `refusal` to convert, to be put behind it; often nothing."""
    return REMEDY if "merge_tokens=" in refusal else ""
