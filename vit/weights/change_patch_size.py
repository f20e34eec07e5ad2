"""A trained network made to work on other patches: of another size, or merged in its blocks.

It has no new weights: the projection is resized as in FlexiViT (vit/model/patch_embed.py),
positions as for images of another size, and merging has none.

Source: Beyer et al., "FlexiViT", section 3, arXiv:2212.08013; Bolya et al., arXiv:2210.09461.
"""

import dataclasses

from vit.config import ModelConfig
from vit.config.parser import all_settings, convert
from vit.errors import ConfigError
from vit.weights.adapt_weights import adapt
from vit.weights.load_model import changed_config
from vit.weights.pretrained import Pretrained
from vit.weights.saved_model import LoadedRun, empty_model, split_decoder


def with_patches(
    run: LoadedRun, *, merge_tokens: int | None = None, patch_size: int | None = None
) -> LoadedRun:
    """`run` with the same weights in a network of other patches; `run` itself where none is given.

    A decoder stays as it is: it looks at the patches that there are.

    Args:
        run: A network with its classes.
        merge_tokens: Patches merged in each block.
        patch_size: Side of a patch in pixels; the projection and the positions are resized.

    Raises:
        ConfigError: The blocks of its network cannot merge tokens, or its images have no whole
            number of such patches.
    """
    asked = {"merge_tokens": merge_tokens, "patch_size": patch_size}
    kinds, config = all_settings(), run.config
    changed = {
        name: convert(kinds[name].kind, value, name)
        for name, value in asked.items()
        if value is not None
    }
    if not changed:
        return run
    _check_patch_size(config, changed.get("patch_size", config.patch_size))
    wanted = changed_config(config, changed)
    encoder, words = split_decoder(run.model.state_dict())
    pretrained = Pretrained(
        state=encoder,
        config=config,
        classes=run.classes,
        preprocessing=run.preprocessing,
        license=None,
        origin="the network",
        stretches=run.stretches,
    )
    state, _ = adapt(pretrained, wanted)
    model = empty_model(wanted, run.decoder)
    model.load_state_dict({**state, **words}, assign=True)
    return dataclasses.replace(run, model=model.eval(), config=wanted)


def _check_patch_size(config: ModelConfig, size: int) -> None:
    """Refuse patches that do not fill the images of a network, whose size is given.

    Raises:
        ConfigError: It names the next smaller and the next larger size that do.
    """
    side = config.image_size
    if size > 0 and not side % size:
        return
    fit = [number for number in range(1, side + 1) if side % number == 0]
    smaller, larger = [n for n in fit if n < size], [n for n in fit if n > size]
    near = [*smaller[-1:], *larger[:1]]
    raise ConfigError(
        f"patch_size={size}: does not divide the {side} pixels of an image; choose "
        f"{' or '.join(map(str, near))}"
    )
