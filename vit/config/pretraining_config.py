"""Settings of pretraining without labels: SimCLR, LeJEPA, DINO, and the masked autoencoder."""

from dataclasses import dataclass

from vit.config.config_section import Section

PRETRAINING_TASKS = ("simclr", "lejepa", "dino", "mae")
"""Tasks that learn without labels."""
OF_VIEWS = (
    *("global_views", "local_views", "local_size", "local_crop"),
    *("projector_dim", "projector_hidden_dim"),
)
SETTINGS_OF: dict[str, tuple[str, ...]] = {
    "simclr": (*OF_VIEWS, "contrastive_temperature"),
    "lejepa": (*OF_VIEWS, "sigreg_weight", "sigreg_projections"),
    "dino": (*OF_VIEWS, "prototypes", "teacher_temperature"),
    "mae": ("mask_ratio", "mae_decoder_dim", "mae_decoder_depth", "normalise_pixels"),
}
"""The settings that each of them reads."""


@dataclass(frozen=True, kw_only=True)
class PretrainingConfig(Section):
    """Pretraining without labels; only with --task simclr, lejepa, dino or mae."""

    global_views: int = 2
    """SimCLR, LeJEPA, DINO: views of an image of full size."""
    local_views: int = 0
    """SimCLR, LeJEPA, DINO: smaller views of an image."""
    local_size: int | None = None
    """SimCLR, LeJEPA, DINO: side of local views in pixels; empty: about half of image_size."""
    local_crop: tuple[float, float] = (0.05, 0.3)
    """SimCLR, LeJEPA, DINO: smallest and largest share of the image area in a local view."""
    projector_dim: int = 128
    """SimCLR, LeJEPA, DINO: width of the embeddings."""
    projector_hidden_dim: int = 512
    """SimCLR, LeJEPA, DINO: width of the two hidden layers of the projector."""
    contrastive_temperature: float = 0.2
    """SimCLR: what similarities are divided by (arXiv:2002.05709)."""
    sigreg_weight: float = 0.05
    """LeJEPA: weight of SIGReg, from 0 to 1; the prediction of views has the rest."""
    sigreg_projections: int = 256
    """LeJEPA: random directions in which embeddings are compared with a normal distribution."""
    prototypes: int = 4096
    """DINO: vectors that embeddings are compared with (arXiv:2104.14294)."""
    teacher_temperature: float = 0.03
    """DINO: what the teacher's cosines are divided by; the student's are by 0.1."""
    mask_ratio: float = 0.75
    """MAE: share of the patches that is hidden (arXiv:2111.06377)."""
    mae_decoder_dim: int | None = None
    """MAE: width of the decoder's tokens; about half of dim when left empty."""
    mae_decoder_depth: int = 2
    """MAE: blocks of the decoder."""
    normalise_pixels: bool = True
    """MAE: predict the pixels of each patch with mean 0 and variance 1."""

    def __post_init__(self) -> None:
        if not 0 < self.mask_ratio < 1:
            self.refuse("mask_ratio", "must be a share between 0 and 1, both excluded")
        self.check_at_least(1, "mae_decoder_depth", "global_views", "sigreg_projections")
        self.check_at_least(1, "projector_dim", "projector_hidden_dim")
        self.check_at_least(2, "prototypes")
        self.check_above(0, "teacher_temperature")
        self.check_at_least(0, "local_views")
        for name in ("mae_decoder_dim", "local_size"):
            if getattr(self, name) is not None:
                self.check_at_least(1, name)
        if self.mae_decoder_dim is not None and self.mae_decoder_dim % 32:
            self.refuse("mae_decoder_dim", "must be a multiple of 32, the width of a head")
        if self.contrastive_temperature <= 0:
            self.refuse("contrastive_temperature", "must be above 0")
        if not 0 <= self.sigreg_weight <= 1:
            self.refuse("sigreg_weight", "must be a share from 0 to 1")
        if self.global_views + self.local_views < 2:
            self.refuse("local_views", "one view predicts nothing; use two views or more in all")
        for name in ("local_size", "local_crop"):
            if self.local_views == 0 and getattr(self, name) != getattr(PretrainingConfig, name):
                self.refuse(name, "local_views=0: there is none; leave it out")
        least, most = self.local_crop
        if not 0 < least <= most <= 1:
            self.refuse("local_crop", "must be two shares of the area, the first not the larger")
