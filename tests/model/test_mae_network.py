"""The masked autoencoder equals transformers' ViTMAEForPreTraining, and leaks no hidden pixel."""

import dataclasses

import pytest
import torch
from einops import rearrange

from vit.config import ModelConfig, PretrainingConfig
from vit.model.build import build_masked_autoencoder
from vit.model.mae_network import (
    choose_patches,
    hide_pixels,
    join_patches,
    pixel_targets,
    reconstruction_losses,
)
from vit.model.position_embedding import sinusoidal_2d
from vit.weights.formats.huggingface_weights import VIT_NAMES
from vit.weights.formats.state_dict_names import fuse_qkv

SMALL = {"image_size": 16, "patch_size": 4, "dim": 32, "depth": 2, "num_heads": 2}
SETTINGS = ModelConfig(**SMALL, position="sinusoidal_2d", norm_eps=1e-12, num_classes=0)
METHOD = PretrainingConfig(mae_decoder_dim=32, mae_decoder_depth=2)


def pixels_of(tensor):
    """transformers' order of a patch's pixels (last or first axis) -> ours."""
    return rearrange(tensor, "(rows cols rgb) ... -> (rgb rows cols) ...", rows=4, cols=4)


def ours_from(theirs):
    """Our names and shapes of all tensors of a ViTMAEForPreTraining, or of their gradients."""
    encoder = {n: t for n, t in theirs.items() if not n.startswith("decoder.")}
    state = VIT_NAMES["vit_mae"].read(encoder, "transformers")
    state["patch_embed.proj.weight"] = state["patch_embed.proj.weight"].flatten(1)
    state = fuse_qkv(state)
    blocks = {n: t for n, t in theirs.items() if n.startswith("decoder.decoder_layers.")}
    renamed = {n.replace("decoder.decoder_layers.", "encoder.layer."): t for n, t in blocks.items()}
    decoder = fuse_qkv(VIT_NAMES["vit_mae"].read(renamed, "transformers"))
    for ours, name in (
        ("embed", "decoder_embed"),
        ("norm", "decoder_norm"),
        ("pred", "decoder_pred"),
    ):
        for kind in ("weight", "bias"):
            decoder[f"{ours}.{kind}"] = theirs[f"decoder.{name}.{kind}"]
    decoder["mask_token"] = theirs["decoder.mask_token"]
    for kind in ("weight", "bias"):
        decoder[f"pred.{kind}"] = pixels_of(decoder[f"pred.{kind}"])
    return state | {f"decoder.{name}": tensor for name, tensor in decoder.items()}


@pytest.mark.parametrize("normalise", [True, False])
def test_masks_loss_and_gradients_equal_transformers(normalise):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 128}
    decoder = {f"decoder_{name}": size for name, size in sizes.items()}
    sizes |= {"num_attention_heads": 2, "decoder_num_attention_heads": 1}
    sizes |= {"image_size": 16, "patch_size": 4, "norm_pix_loss": normalise}
    config = transformers.ViTMAEConfig(**sizes, **decoder, attn_implementation="eager")
    torch.manual_seed(0)
    theirs = transformers.ViTMAEForPreTraining(config).eval()
    for part in (*theirs.modules(), *theirs.parameters()):  # else their positions stay zero
        part._is_hf_initialized = False
    theirs.vit.embeddings.initialize_weights()
    theirs.decoder.initialize_weights(16)
    for parameter in theirs.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.2)
    ours = build_masked_autoencoder(SETTINGS, METHOD).eval()
    state = ours_from(theirs.state_dict())
    torch.testing.assert_close(ours.pos_embed, state["pos_embed"], atol=1e-6, rtol=0)
    positions = theirs.decoder.decoder_pos_embed
    sines = torch.nn.functional.pad(sinusoidal_2d((4, 4), 32), (0, 0, 1, 0))
    torch.testing.assert_close(positions[0], sines, atol=1e-6, rtol=0)
    ours.load_state_dict(state)
    images, noise = torch.randn(3, 3, 16, 16), torch.rand(3, 16)
    expected = theirs(pixel_values=images, noise=noise)
    expected.loss.backward()
    found = ours(images, noise)
    torch.testing.assert_close(found.hidden, expected.mask, atol=0, rtol=0)
    predicted = rearrange(
        expected.logits, "n p (rows cols rgb) -> n p (rgb rows cols)", rows=4, cols=4
    )
    torch.testing.assert_close(found.patches, predicted, atol=1e-5, rtol=1e-5)
    targets = pixel_targets(images, 4, normalise=normalise)
    loss = reconstruction_losses(found, targets).mean()
    torch.testing.assert_close(loss, expected.loss, atol=1e-5, rtol=1e-5)
    loss.backward()
    gradients = ours_from(
        {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in theirs.named_parameters()}
    )
    compared = 0
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], atol=1e-5, rtol=1e-4, msg=name)
        compared += bool(parameter.grad.any())
    assert compared > 40


PATCHES_ALONE = dataclasses.replace(
    SETTINGS, class_token=False, pooling="mean", final_norm="tokens"
)


@pytest.mark.parametrize("stem", [{}, {"stem": "conv"}, {"stem": "conv", "stem_norm": "layernorm"}])
def test_hidden_pixels_reach_no_prediction(stem):
    settings = dataclasses.replace(PATCHES_ALONE, **stem)
    network = build_masked_autoencoder(settings, METHOD).eval()
    images, noise = torch.randn(2, 3, 16, 16), torch.rand(2, 16)
    found = network(images, noise)
    assert found.hidden.sum(dim=1).tolist() == [12, 12]
    shown = hide_pixels(torch.ones_like(images), found.hidden, 4)
    changed = torch.where(shown.bool(), images, torch.randn_like(images))
    assert not torch.equal(changed, images)
    again = network(changed, noise)
    torch.testing.assert_close(again.patches, found.patches, atol=1e-6, rtol=0)
    other = network(images + 0.1 * shown, noise)
    assert not torch.allclose(other.patches, found.patches, atol=1e-4)


def test_a_convolutional_stem_embeds_each_kept_patch_as_an_image_of_its_own():
    """Against the whole network on that patch alone, with sinusoidal positions added after it."""
    settings = dataclasses.replace(PATCHES_ALONE, stem="conv", position="sinusoidal_2d")
    network = build_masked_autoencoder(settings, METHOD).eval()
    images, noise = torch.randn(2, 3, 16, 16), torch.rand(2, 16)
    kept = choose_patches(noise, 0.75)[0]
    found, context = network.embed_kept(images, kept)
    assert context.grid == (4, 4)
    positions = network.embed(images)[0] - network.patch_embed(images)[0]
    for image, places in enumerate(kept.tolist()):
        for place in places:
            row, col = divmod(place, 4)
            patch = images[image, :, 4 * row : 4 * row + 4, 4 * col : 4 * col + 4]
            expected = network.patch_embed(patch[None])[0][0, 0] + positions[image, place]
            torch.testing.assert_close(found[image, place], expected, atol=1e-5, rtol=0)


def test_the_encoder_computes_a_quarter_of_the_tokens():
    network = build_masked_autoencoder(SETTINGS, METHOD).eval()
    seen = []
    network.blocks[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape))
    network(torch.randn(2, 3, 16, 16), torch.rand(2, 16))
    assert seen == [(2, 1 + 4, 32)]


def test_every_patch_has_its_place_and_one_is_always_kept():
    noise = torch.rand(5, 9)
    for ratio, count in ((0.75, 2), (0.5, 4), (0.99, 1)):
        kept, restore, hidden = choose_patches(noise, ratio)
        assert kept.shape == (5, count)
        assert (hidden.sum(dim=1) == 9 - count).all()
        order = torch.cat([kept, hidden.nonzero()[:, 1].view(5, -1)], dim=1)
        assert torch.equal(order.gather(1, restore), torch.arange(9).expand(5, -1))


def test_patches_join_to_the_image():
    images = torch.randn(2, 3, 8, 12)
    patches = pixel_targets(images, 4, normalise=False)
    assert torch.equal(join_patches(patches, 2, 4), images)
