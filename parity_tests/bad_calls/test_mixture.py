"""Bad routers, experts and mixtures: the same error in the same words on both sides."""

import numpy as np
import pytest

pytestmark = pytest.mark.usefixtures("no_shape_checks")


def router(side, *, d_model=4, num_experts=8, top_k=2, scores="softmax", **options):
    return side.build("Router", d_model, num_experts, top_k, scores, **options)


def experts(side, *, num_experts=8, d_model=4, d_hidden=6, **options):
    return side.build("Experts", num_experts, d_model, d_hidden, **options)


def zeros(side, *shape):
    return side.array(np.zeros(shape))


CONSTRUCTORS = {
    # How many are chosen, of how many.
    "top_k above the experts": (
        lambda side: router(side, top_k=9),
        (
            r"top_k must be at most the number of experts.*top_k=9, num_experts=8, groups=1,"
            r" top_groups=1\. Lower top_k$"
        ),
    ),
    "top_k above the groups": (
        lambda side: router(side, top_k=3, groups=4, top_groups=1),
        (
            r"top_k must be at most .* top_groups groups.*top_k=3, num_experts=8, groups=4,"
            r" top_groups=1"
        ),
    ),
    "more groups chosen than there are": (
        lambda side: router(side, groups=2, top_groups=3),
        r"top_k must be at most .*groups=2, top_groups=3",
    ),
    "groups do not divide": (
        lambda side: router(side, groups=3),
        (
            r"groups must divide num_experts into groups of two experts at least.*num_experts=8,"
            r" groups=3\. Pass groups=1"
        ),
    ),
    "groups of one expert": (
        lambda side: router(side, groups=8),
        r"groups must divide .*num_experts=8, groups=8",
    ),
    # Sizes and names.
    "no top_k": (lambda side: router(side, top_k=0), {"top_k": 0}),
    "no router width": (lambda side: router(side, d_model=0), {"d_model": 0}),
    "scores": (
        lambda side: router(side, scores="relu"),
        r"scores must be one of 'softmax', 'sigmoid'; got 'relu'",
    ),
    "no experts": (lambda side: experts(side, num_experts=0), {"num_experts": 0}),
    "no hidden": (lambda side: experts(side, d_hidden=0), {"d_hidden": 0}),
    "form": (
        lambda side: experts(side, form="ragged"),
        r"form must be one of 'auto', 'dense', 'sorted'; got 'ragged'",
    ),
    "activation": (
        lambda side: experts(side, activation="relu6"),
        r"activation must be one of 'gelu_tanh'.*'relu6'",
    ),
    "no activation": (
        lambda side: experts(side, activation=3),
        (
            r"activation must be Callable; got int\. Pass activation=\"silu\", or a function of"
            r" gate and up"
        ),
    ),
    "limit": (lambda side: side.ClampedSwiGLU(0.0), r"limit bounds .* must be positive; got 0\.0"),
    # Parts of another kind.
    "no router": (
        lambda side: side.MixtureOfExperts(experts(side), experts(side)),
        r"router must be Router; got Experts\. Pass router=Router",
    ),
    "no expert layers": (
        lambda side: side.MixtureOfExperts(router(side), router(side)),
        r"experts must be Experts; got Router\. Pass experts=Experts",
    ),
    # Parts that do not fit one another.
    "another number of experts": (
        lambda side: side.MixtureOfExperts(router(side), experts(side, num_experts=6)),
        (
            r"one d_model, and .* one num_experts; got router\.num_experts=8, router\.d_model=4,"
            r" experts\.num_experts=6"
        ),
    ),
    "another shared width": (
        lambda side: side.MixtureOfExperts(
            router(side), experts(side), side.build("GatedFeedForward", 5)
        ),
        r"one d_model.*experts\.d_model=4, shared\.d_model=5\. Construct them with the same",
    ),
    "a gate of nothing": (
        lambda side: side.MixtureOfExperts(
            router(side), experts(side), None, side.build("Linear", 4, 1)
        ),
        r"shared_gate is that of a shared layer; got shared=None\. Pass shared, or no gate",
    ),
    # Calls.
    "no routing": (
        lambda side: side.load_balancing_loss([]),
        r"the load is that of .*; got no routing\. Pass those",
    ),
    "width of the router's input": (
        lambda side: router(side)(zeros(side, 3, 5)),
        r"x .*d_model.*5",
    ),
    "width of the experts' input": (
        lambda side: experts(side)(zeros(side, 3, 5), router(side)(zeros(side, 3, 4))),
        r"x .*d_model.*5",
    ),
}


@pytest.mark.parametrize("case", CONSTRUCTORS)
def test_a_bad_mixture_is_refused(case, assert_same_error):
    assert_same_error(*CONSTRUCTORS[case])
