"""Settings of pretraining without labels: SimCLR, LeJEPA, DINO, and the masked autoencoder."""

from dataclasses import dataclass

from vit.config.config_section import ON, Section, setting

VIEWS = ("simclr", "lejepa", "dino")
"""Tasks that compare views of an image."""
LOCAL = ({"local_views": ON},)


@dataclass(frozen=True, kw_only=True)
class PretrainingConfig(Section):
    """Pretraining without labels; only with --task simclr, lejepa, dino or mae."""

    global_views: int = setting(2, least=1, tasks=VIEWS)
    """SimCLR, LeJEPA, DINO: views of an image of full size."""
    local_views: int = setting(0, least=0, tasks=VIEWS)
    """SimCLR, LeJEPA, DINO: smaller views of an image."""
    local_size: int | None = setting(None, least=1, read_by=LOCAL, tasks=VIEWS)
    """SimCLR, LeJEPA, DINO: side of local views in pixels; empty: about half of image_size."""
    local_crop: tuple[float, float] = setting(
        (0.05, 0.3), above=0, most=1, read_by=LOCAL, tasks=VIEWS
    )
    """SimCLR, LeJEPA, DINO: smallest and largest share of the image area in a local view."""
    projector_dim: int = setting(128, least=1, tasks=VIEWS)
    """SimCLR, LeJEPA, DINO: width of the embeddings."""
    projector_hidden_dim: int = setting(512, least=1, tasks=VIEWS)
    """SimCLR, LeJEPA, DINO: width of the two hidden layers of the projector."""
    contrastive_temperature: float = setting(0.2, above=0, tasks=("simclr",))
    """SimCLR: what similarities are divided by (arXiv:2002.05709)."""
    sigreg_weight: float = setting(0.05, least=0, most=1, tasks=("lejepa",))
    """LeJEPA: weight of SIGReg, from 0 to 1; the prediction of views has the rest."""
    sigreg_projections: int = setting(256, least=1, tasks=("lejepa",))
    """LeJEPA: random directions in which embeddings are compared with a normal distribution."""
    prototypes: int = setting(4096, least=2, tasks=("dino",))
    """DINO: vectors that embeddings are compared with (arXiv:2104.14294)."""
    teacher_temperature: float = setting(0.03, above=0, tasks=("dino",))
    """DINO: what the teacher's cosines are divided by; the student's are by 0.1."""
    mask_ratio: float = setting(0.75, above=0, below=1, tasks=("mae",))
    """MAE: share of the patches that is hidden (arXiv:2111.06377)."""
    mae_decoder_dim: int | None = setting(None, least=1, tasks=("mae",))
    """MAE: width of the decoder's tokens; about half of dim when left empty."""
    mae_decoder_depth: int = setting(2, least=1, tasks=("mae",))
    """MAE: blocks of the decoder."""
    normalise_pixels: bool = setting(True, tasks=("mae",))
    """MAE: predict the pixels of each patch with mean 0 and variance 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mae_decoder_dim is not None and self.mae_decoder_dim % 32:
            self.refuse("mae_decoder_dim", "must be a multiple of 32, the width of a head")
        if self.global_views + self.local_views < 2:
            self.refuse("local_views", "one view predicts nothing; use two views or more in all")
        if self.local_crop[0] > self.local_crop[1]:
            self.refuse("local_crop", "must be two shares of the area, the first not the larger")
