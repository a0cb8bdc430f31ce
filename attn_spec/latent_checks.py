"""Checks of latent attention that both packages share, with the same messages."""


def check_latent_norm(name: str, norm: object, rank: int | None) -> None:
    """Raise unless the norm of a latent is as wide as that; None is no norm, or no latent."""
    if norm is None:
        return
    if rank is None:
        raise ValueError(
            f"{name} norms the latent of queries; got q_lora_rank=None. Leave out {name}, or pass a"
            " rank"
        )
    # A norm of one's own says its width by this name.
    width = getattr(norm, "d_model", None)
    if width != rank:
        raise ValueError(
            f"{name} is as wide as its latent, {rank}; got one of d_model={width}. Pass"
            f" {name}=RMSNorm({rank})"
        )
