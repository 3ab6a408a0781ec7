"""What each optimizer makes of a gradient, before the learning rate multiplies it: chains of optax's pieces.

In every formula g is the (clipped) gradient, p the parameters, t = 1, 2, … the number of the update, and the update is
``p -= rate * direction``. Moments begin at 0. Decay is skipped for the parameters that the mask leaves out.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import optax
from optax import contrib

from jaxformer.training.centered_rms import scale_by_deviation
from jaxformer.training.layerwise import Number, over_layers, scale_by_factored_moments, scale_matrices
from jaxformer.training.weight_decay import decay_in_gradient, decoupled_decay

Links = list[optax.GradientTransformation]


@dataclasses.dataclass(frozen=True)
class Parameters:
    """What rules are told of the parameters; the first three are trees like them.

    Attributes:
      decayed: bools: which weight decay touches.
      stack_axes: ints: how many leading axes are those of stacks.
      matrices: bools: which are matrices within the body.
      peak_rate: the highest learning rate.
    """

    decayed: Any
    stack_axes: Any
    matrices: Any
    peak_rate: Number

    def decay(self, weight_decay: Number, decay_multiplier: str) -> optax.GradientTransformation:
        """Decoupled weight decay."""
        return decoupled_decay(weight_decay, decay_multiplier, self.decayed, self.peak_rate)


def gradient_descent(parameters: Parameters, *, weight_decay: Number = 0.0) -> Links:
    """Gradient descent on the whole training set: direction = g + weight_decay p, as of sgd.

    The update knows no data: a run sees to it that ``train.batch_size`` is all rows of the training data, of which
    ``train.accumulation_steps`` parts are computed in turn; each epoch is then one step.
    """
    return sgd(parameters, weight_decay=weight_decay)


def sgd(parameters: Parameters, *, weight_decay: Number = 0.0) -> Links:
    """Stochastic gradient descent: direction = g + weight_decay p (without momentum L2 and decoupled decay are one).

    Robbins and Monro 1951, "A Stochastic Approximation Method".
    """
    return [decay_in_gradient(weight_decay, parameters.decayed)]


def momentum(
    parameters: Parameters, *, momentum: Number = 0.9, nesterov: bool = False, weight_decay: Number = 0.0
) -> Links:
    """Heavy ball, or Nesterov's look-ahead: a running sum of gradients, without dampening.

    With g' = g + weight_decay p (L2): m_t = momentum m_(t-1) + g', direction = m_t, with ``nesterov``
    g' + momentum m_t. The rate multiplies the whole sum, so that a change of the rate acts at once; in the paper each
    gradient keeps the rate of its own step, the same while the rate is constant. Polyak 1964; Sutskever et al. 2013,
    "On the importance of initialization and momentum in deep learning", equations 1 to 4.
    """
    return [decay_in_gradient(weight_decay, parameters.decayed), optax.trace(momentum, nesterov=nesterov)]


def rmsprop(
    parameters: Parameters,
    *,
    b2: Number = 0.9,
    epsilon: Number = 1e-8,
    epsilon_in_root: bool = False,
    initial_scale: Number = 0.0,
    centered: bool = False,
    momentum: Number | None = None,
    weight_decay: Number = 0.0,
) -> Links:
    """RMSProp: the gradient over the root of a running mean of its square, without bias correction.

    With g' = g + weight_decay p (L2): v_t = b2 v_(t-1) + (1 - b2) g'^2, v_0 = ``initial_scale``, and
    direction = g' / (sqrt(v_t) + epsilon), or with ``epsilon_in_root`` g' / sqrt(v_t + epsilon). ``centered`` takes
    the square of the running mean of g' off v_t (Graves 2013, arXiv:1308.0850, equations 38 to 41, whose epsilon is
    in the root); ``momentum`` keeps a running sum of directions (None = none). Tieleman and Hinton 2012, lecture 6.5,
    says neither where epsilon is nor how v begins.
    """
    scale = scale_by_deviation if centered else optax.scale_by_rms
    links = [
        decay_in_gradient(weight_decay, parameters.decayed),
        scale(b2, epsilon, initial_scale, epsilon_in_root),
    ]
    return links if momentum is None else [*links, optax.trace(momentum)]


def adam(parameters: Parameters, *, b1: Number = 0.9, b2: Number = 0.999, epsilon: Number = 1e-8) -> Links:
    """Adam, without weight decay: m / (sqrt(v) + epsilon), moments bias-corrected.

    m_t = b1 m_(t-1) + (1 - b1) g, v_t = b2 v_(t-1) + (1 - b2) g^2; direction = m_t / (1 - b1^t) divided by
    sqrt(v_t / (1 - b2^t)) + epsilon. Kingma and Ba 2015, arXiv:1412.6980, algorithm 1.
    """
    del parameters
    return [optax.scale_by_adam(b1=b1, b2=b2, eps=epsilon)]


def adam_l2(
    parameters: Parameters,
    *,
    b1: Number = 0.9,
    b2: Number = 0.999,
    epsilon: Number = 1e-8,
    weight_decay: Number = 1e-4,
) -> Links:
    """Adam with L2: the decay is part of the gradient, g + weight_decay p, and so enters both moments.

    Loshchilov and Hutter 2019, arXiv:1711.05101, algorithm 2, line 6.
    """
    return [decay_in_gradient(weight_decay, parameters.decayed), *adam(parameters, b1=b1, b2=b2, epsilon=epsilon)]


def adamw(
    parameters: Parameters,
    *,
    b1: Number = 0.9,
    b2: Number = 0.95,
    epsilon: Number = 1e-8,
    weight_decay: Number = 0.1,
    decay_multiplier: str = "rate",
) -> Links:
    """Adam's direction with decoupled decay: m / (sqrt(v) + epsilon) + weight_decay * p, moments bias-corrected.

    Kingma and Ba 2015, "Adam: A Method for Stochastic Optimization", arXiv:1412.6980, algorithm 1; Loshchilov and
    Hutter 2019, "Decoupled Weight Decay Regularization", arXiv:1711.05101, algorithm 2, whose decay is multiplied by
    the schedule without the rate: ``decay_multiplier="schedule"``; "rate" is as in optax and PyTorch.
    """
    return [*adam(parameters, b1=b1, b2=b2, epsilon=epsilon), parameters.decay(weight_decay, decay_multiplier)]


def adafactor(
    parameters: Parameters,
    *,
    decay_exponent: Number = 0.8,
    epsilon: Number = 1e-30,
    smallest_factored: int = 128,
    clip_update: Number = 1.0,
    relative_scale: bool = True,
    smallest_scale: Number = 1e-3,
    b1: Number | None = None,
    weight_decay: Number = 0.0,
    decay_multiplier: str = "rate",
) -> Links:
    """Adafactor: second moments of matrices by rows and columns, updates clipped, relative to the parameter's size.

    u = g / sqrt(V_t) (see ``scale_by_factored_moments``), then u / max(1, RMS(u) / clip_update), then, with
    ``relative_scale``, times max(smallest_scale, RMS(p)); all of each layer and expert by itself; ``b1`` keeps a
    running mean of that (None = none; not bias-corrected), to which decoupled decay is added. The paper's relative
    step size min(1e-2, t^-0.5) is the schedule's to give. Shazeer and Stern 2018, arXiv:1804.04235, algorithm 4.
    """
    axes = parameters.stack_axes
    links = [
        scale_by_factored_moments(decay_exponent, epsilon, smallest_factored, axes),
        over_layers(optax.clip_by_block_rms(clip_update), axes),
    ]
    if relative_scale:
        links.append(over_layers(optax.scale_by_param_block_rms(smallest_scale), axes))
    if b1 is not None:
        links.append(optax.ema(b1, debias=False))
    return [*links, parameters.decay(weight_decay, decay_multiplier)]


def lion(
    parameters: Parameters,
    *,
    b1: Number = 0.9,
    b2: Number = 0.99,
    weight_decay: Number = 0.1,
    decay_multiplier: str = "rate",
) -> Links:
    """Lion: the sign of a mean of gradient and momentum, with decoupled decay.

    direction = sign(b1 m_(t-1) + (1 - b1) g) + weight_decay p, then m_t = b2 m_(t-1) + (1 - b2) g. Rates are to be 3
    to 10 times smaller than AdamW's, decay as many times larger. Chen et al. 2023, arXiv:2302.06675, algorithm 2.
    """
    return [optax.scale_by_lion(b1=b1, b2=b2), parameters.decay(weight_decay, decay_multiplier)]


def muon(
    parameters: Parameters,
    *,
    momentum: Number = 0.95,
    nesterov: bool = True,
    newton_schulz_steps: int = 5,
    muon_scale: str = "rms",
    b1: Number = 0.9,
    b2: Number = 0.95,
    epsilon: Number = 1e-8,
    weight_decay: Number = 0.1,
    decay_multiplier: str = "rate",
) -> Links:
    """Muon for the body's matrices, each of a layer and expert: momentum made orthogonal; AdamW for all the rest.

    The rest are embeddings, what stands above the body, and all that are no matrices: norms and biases. For a matrix,
    m_t = momentum m_(t-1) + (1 - momentum) g, bias-corrected, with ``nesterov`` mixed once more with g (Dozat's form,
    as optax has it); then ``newton_schulz_steps`` of X <- 3.4445 X - 4.775 X X^T X + 2.0315 (X X^T)^2 X from
    X = m / |m|; then a factor of the shape (see ``scale_matrices``). The kernel of a projection to all heads is one
    matrix. ``b1``, ``b2`` and ``epsilon`` are AdamW's; decay is decoupled for both. Jordan et al. 2024, "Muon: An
    optimizer for hidden layers in neural networks"; Liu et al. 2025, arXiv:2502.16982, section 2.
    """
    axes = contrib.MuonDimensionNumbers(reduction_axis=-2, output_axis=-1)
    orthogonal = contrib.scale_by_muon(
        ns_steps=newton_schulz_steps,
        beta=momentum,
        nesterov=nesterov,
        weight_dimension_numbers=lambda updates: jax.tree.map(lambda _: axes, updates),
    )
    others = jax.tree.map(lambda matrix: not matrix, parameters.matrices)
    return [
        optax.masked(optax.chain(orthogonal, scale_matrices(muon_scale)), parameters.matrices),
        optax.masked(optax.scale_by_adam(b1=b1, b2=b2, eps=epsilon), others),
        parameters.decay(weight_decay, decay_multiplier),
    ]


OPTIMIZERS: dict[str, Callable[..., Links]] = {
    "adafactor": adafactor,
    "adam": adam,
    "adam_l2": adam_l2,
    "adamw": adamw,
    "gradient_descent": gradient_descent,
    "lion": lion,
    "momentum": momentum,
    "muon": muon,
    "rmsprop": rmsprop,
    "sgd": sgd,
}
"""By name; keyword arguments are the optimizer's hyperparameters with its own defaults."""
