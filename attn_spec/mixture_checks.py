"""Checks of a mixture of experts that both packages share, with the same messages."""

from attn_spec.checks import check_positive


def check_router(num_experts: int, top_k: int, groups: int, top_groups: int) -> None:
    """Raise unless the groups divide the experts, and the chosen groups hold `top_k` experts."""
    check_positive(num_experts=num_experts, top_k=top_k, groups=groups, top_groups=top_groups)
    # The two best experts of a group choose it, as in DeepSeek-V3.
    if num_experts % groups or (groups > 1 and num_experts // groups < 2):
        raise ValueError(
            "groups must divide num_experts into groups of two experts at least, whose sum chooses"
            f" a group; got num_experts={num_experts}, groups={groups}. Pass groups=1, or other"
            " numbers"
        )
    if top_groups > groups or top_k > num_experts // groups * top_groups:
        raise ValueError(
            f"top_k must be at most the number of experts in top_groups groups; got top_k={top_k},"
            f" num_experts={num_experts}, groups={groups}, top_groups={top_groups}. Lower top_k"
        )


def check_experts(
    router: tuple[int, int], experts: tuple[int, int], shared: int | None, lone_gate: bool
) -> None:
    """Raise unless router, experts and shared layer agree, and a gate has a shared layer."""
    if router != experts or shared not in (None, router[1]):
        of_shared = "" if shared is None else f", shared.d_model={shared}"
        raise ValueError(
            "all parts of a mixture have one d_model, and router and experts one num_experts; got"
            f" router.num_experts={router[0]}, router.d_model={router[1]},"
            f" experts.num_experts={experts[0]}, experts.d_model={experts[1]}{of_shared}."
            " Construct them with the same"
        )
    if lone_gate:
        raise ValueError(
            "shared_gate is that of a shared layer; got shared=None. Pass shared, or no gate"
        )
