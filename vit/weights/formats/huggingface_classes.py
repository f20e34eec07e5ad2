"""Registers our network with transformers, as model_type "vit_toolkit", when it is imported.

AutoModelForImageClassification.from_pretrained(FOLDER) then opens the folders of `vit convert` that
no class of transformers can express.
"""

from typing import Any

from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling, ImageClassifierOutput
from transformers.models.auto.configuration_auto import AutoConfig
from transformers.models.auto.modeling_auto import AutoModel, AutoModelForImageClassification

from vit.config.setting_layers import parse_model_config
from vit.model.blocks import ParallelBlock
from vit.model.build import assemble_model
from vit.model.initialization import init_weights
from vit.model.layers import BLOCKS
from vit.weights.formats.huggingface_config import MODEL_TYPE


class VitToolkitConfig(PretrainedConfig):
    """transformers' config with our settings under `network`."""

    model_type = MODEL_TYPE

    def __init__(self, network: dict[str, Any] | None = None, **others: Any) -> None:
        self.network = network or {}
        super().__init__(**others)


class _Base(PreTrainedModel):
    config_class = VitToolkitConfig
    config: VitToolkitConfig
    base_model_prefix = ""
    main_input_name = "pixel_values"
    _no_split_modules = [kind.__name__ for kind in (*BLOCKS.values(), ParallelBlock)]  # noqa: RUF012

    def __init__(self, config: VitToolkitConfig) -> None:
        super().__init__(config)
        self.network = assemble_model(parse_model_config(config.network))
        if not next(self.network.parameters()).is_meta:
            init_weights(self.network)
        self.post_init()

    def _init_weights(self, _: Any) -> None:
        """Does nothing: `init_weights` has already initialised all weights."""


class VitToolkitModel(_Base):
    """The encoder: tokens after the final norm, and the pooled output."""

    def forward(
        self, pixel_values: Tensor, return_dict: bool | None = None, **_: Any
    ) -> BaseModelOutputWithPooling | tuple[Tensor, Tensor]:
        """(batch, channels, height, width) -> (batch, tokens, dim) and (batch, pooled_dim)"""
        tokens, context = self.network.encode(pixel_values)
        pooled = self.network.pool(tokens, context)
        if return_dict is False:
            return tokens, pooled
        return BaseModelOutputWithPooling(last_hidden_state=tokens, pooler_output=pooled)


class VitToolkitForImageClassification(_Base):
    """The encoder with a classification head."""

    def forward(
        self,
        pixel_values: Tensor,
        labels: Tensor | None = None,
        return_dict: bool | None = None,
        **_: Any,
    ) -> ImageClassifierOutput | tuple[Tensor, ...]:
        """(batch, channels, height, width) -> logits (batch, classes), and a loss with labels"""
        logits = self.network(pixel_values)
        loss = None if labels is None else self.loss_function(labels, logits, self.config)
        if return_dict is False:
            return (logits,) if loss is None else (loss, logits)
        return ImageClassifierOutput(loss=loss, logits=logits)


AutoConfig.register(MODEL_TYPE, VitToolkitConfig)
AutoModel.register(VitToolkitConfig, VitToolkitModel)
AutoModelForImageClassification.register(VitToolkitConfig, VitToolkitForImageClassification)
