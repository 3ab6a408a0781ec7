"""The mixture of experts: a router sends each token to a few of many feed-forward layers."""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxformer.functional import (
    DISPATCHES,
    balance_loss,
    check_experts,
    compute_dtype,
    grouped_matmul,
    route_tokens,
    router_jitter,
    router_z_loss,
)
from jaxformer.layers.feed_forward import ACTIVATIONS, FeedForward


class ExpertsOutput(NamedTuple):
    """What ``MixtureOfExperts`` returns.

    Attributes:
      output: [B, T, embed_dim]; zeros for padding and for tokens that were dropped.
      losses: ``expert_balance`` and ``router_z``, scalars times their weights; one whose weight is 0 is left out.
      metrics: ``expert_overflow``: (dropped choices, choices of real tokens), float32 scalars, to be added up and
        divided.
    """

    output: Array
    losses: dict[str, Array]
    metrics: dict[str, tuple[Array, Array]]


class MixtureOfExperts(nn.Module):
    """A router and ``num_experts`` feed-forward layers, of which each token uses ``experts_per_token``.

    output(x) = sum over the chosen experts e of gate_e(x) FFN_e(x) (+ FFN_shared(x)); see ``route_tokens`` for the
    gates and ``jaxformer.functional.einsum_dispatch`` for what a capacity drops. In evaluation and generation
    (``deterministic``) nothing is dropped, so that a token's output depends on that token alone.

    Shazeer et al. 2017, arXiv:1701.06538; Lepikhin et al. 2020, "GShard", arXiv:2006.16668 (two experts a token);
    Fedus et al. 2021, "Switch Transformers", arXiv:2101.03961 (one); shared expert: Dai et al. 2024, "DeepSeekMoE",
    arXiv:2401.06066, section 3.2 (here one, of the experts' width).

    Args:
      num_experts: experts (E), the leading axis of all their parameters.
      mlp_dim: hidden width of an expert.
      experts_per_token: experts that a token uses (K).
      capacity_factor: in training an expert takes of each row ceil(factor * K * tokens / E) tokens, and drops the rest;
        None = nothing is dropped in training either.
      dispatch: ``sort`` or ``einsum``, equal in what they compute.
      router_jitter: in training the router's input is multiplied by noise in [1 - jitter, 1 + jitter].
      shared_expert: one more expert that every token uses with gate 1.
      balance_loss_weight: factor of the balance loss (alpha); 0 = no such loss.
      router_z_loss_weight: factor of the router's z-loss; 0 = no such loss.
      activation: a name of ``ACTIVATIONS``.
      use_bias: whether the experts' projections have biases; the router has none.
      dropout_rate: dropout of the hidden layers, fraction in [0, 1), the same elements in both dispatches.
      dtype: dtype of the experts' computation; the router's is float32.
      param_dtype: dtype of the parameters.
      kernel_init: initialiser of the router and of the projections into the hidden layers.
      out_kernel_init: initialiser of the projections out of them.

    Raises:
      ValueError: counts that can't be, or an unknown activation or dispatch.
    """

    num_experts: int
    mlp_dim: int
    experts_per_token: int = 1
    capacity_factor: float | None = None
    dispatch: str = "sort"
    router_jitter: float = 0.0
    shared_expert: bool = False
    balance_loss_weight: float = 0.01
    router_z_loss_weight: float = 0.001
    activation: str = "gelu_tanh"
    use_bias: bool = True
    dropout_rate: float = 0.0
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32
    kernel_init: Callable = nn.initializers.normal(0.02)
    out_kernel_init: Callable = nn.initializers.normal(0.02)

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], *, key_mask: Bool[Array, "B T"] | None = None, deterministic: bool = True
    ) -> ExpertsOutput:
        """Apply the layer.

        Args:
          x: [B, T, embed_dim]; a row is a routing group.
          key_mask: bool [B, T], True = the token exists; padding is never routed and takes no capacity.
          deterministic: switches dropout, jitter and capacity off.
        """
        check_experts(self.num_experts, self.experts_per_token, self.capacity_factor)
        if self.dispatch not in DISPATCHES:
            raise ValueError(f"dispatch={self.dispatch!r} must be one of {', '.join(DISPATCHES)}")
        logits = self._router(x, deterministic)
        routes = route_tokens(logits, experts_per_token=self.experts_per_token, key_mask=key_mask)
        experts = Experts(
            self.num_experts,
            self.mlp_dim,
            x.shape[-1],
            self.activation,
            self.use_bias,
            self.dropout_rate,
            self.dtype,
            self.param_dtype,
            self.kernel_init,
            self.out_kernel_init,
            name="experts",
        )
        output, dropped = DISPATCHES[self.dispatch](
            x.astype(self.dtype),
            routes,
            experts.function(deterministic),
            capacity_factor=None if deterministic else self.capacity_factor,
        )
        if self.shared_expert:
            output = output + self._shared(x, routes.mask, deterministic)
        losses = {}
        if self.balance_loss_weight:
            losses["expert_balance"] = self.balance_loss_weight * balance_loss(routes)
        if self.router_z_loss_weight:
            losses["router_z"] = self.router_z_loss_weight * router_z_loss(logits, routes.mask)
        chosen = self.experts_per_token * routes.mask.sum()
        overflow = dropped.astype(jnp.float32), chosen.astype(jnp.float32)
        return ExpertsOutput(output, losses, {"expert_overflow": overflow})

    def _router(self, x: Float[Array, "B T D"], deterministic: bool) -> Float[Array, "B T E"]:
        """Logits in at least float32."""
        kernel = Router(self.num_experts, x.shape[-1], self.param_dtype, self.kernel_init, name="router")()
        dtype = compute_dtype(x.dtype)
        x = x.astype(dtype)
        if self.router_jitter and not deterministic:
            x = router_jitter(x, self.make_rng("dropout"), self.router_jitter)
        # Fast products in fewer bits would send tokens elsewhere.
        return jnp.einsum("btd,de->bte", x, kernel.astype(dtype), precision=jax.lax.Precision.HIGHEST)

    def _shared(self, x: Array, mask: Array, deterministic: bool) -> Array:
        shared = FeedForward(
            mlp_dim=self.mlp_dim,
            activation=self.activation,
            use_bias=self.use_bias,
            dropout_rate=self.dropout_rate,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            kernel_init=self.kernel_init,
            out_kernel_init=self.out_kernel_init,
            name="shared",
        )
        # Padding may be NaN.
        x = jnp.where(mask[..., None], x, jnp.zeros_like(x))
        out = shared(x, deterministic=deterministic)
        return jnp.where(mask[..., None], out, jnp.zeros_like(out))


class Router(nn.Module):
    """The router's kernel [features, num_experts]."""

    num_experts: int
    features: int
    param_dtype: Any
    kernel_init: Callable

    @nn.compact
    def __call__(self) -> Float[Array, "D E"]:
        """The kernel."""
        return self.param("kernel", self.kernel_init, (self.features, self.num_experts), self.param_dtype)


class StackedProjection(nn.Module):
    """Parameters of one projection of every expert: ``kernel`` [E, inputs, outputs] and ``bias`` [E, outputs]."""

    num_experts: int
    inputs: int
    outputs: int
    use_bias: bool
    param_dtype: Any
    kernel_init: Callable

    @nn.compact
    def __call__(self) -> tuple[Float[Array, "E I O"], Float[Array, "E O"] | None]:
        """The kernels and the biases (None without)."""

        def draw(key: Array) -> Array:
            # Each expert by itself: an initialiser takes the widths from the last two axes alone.
            keys = jax.random.split(key, self.num_experts)
            return jax.vmap(lambda key: self.kernel_init(key, (self.inputs, self.outputs), self.param_dtype))(keys)

        kernel = self.param("kernel", draw)
        if not self.use_bias:
            return kernel, None
        return kernel, self.param("bias", nn.initializers.zeros, (self.num_experts, self.outputs), self.param_dtype)


class Experts(nn.Module):
    """The stacked feed-forward layers; arguments as of ``MixtureOfExperts``."""

    num_experts: int
    mlp_dim: int
    features: int
    activation: str
    use_bias: bool
    dropout_rate: float
    dtype: Any
    param_dtype: Any
    kernel_init: Callable
    out_kernel_init: Callable

    @nn.compact
    def function(self, deterministic: bool) -> Callable[[Array, Array | None, Array], Array]:
        """The experts as ``jaxformer.functional.Experts``."""
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation={self.activation!r} must be one of {sorted(ACTIVATIONS)}")
        activation, gated = ACTIVATIONS[self.activation]
        up = self._projection("up", self.features, self.mlp_dim, self.kernel_init)
        gate = self._projection("gate", self.features, self.mlp_dim, self.kernel_init) if gated else None
        down = self._projection("down", self.mlp_dim, self.features, self.out_kernel_init)
        rng = None if deterministic or not self.dropout_rate else self.make_rng("dropout")

        # Recomputing the activation keeps one array of the hidden width for the backward pass instead of several.
        @jax.checkpoint
        def contract(raised: Array, gated: Array | None, down: Any, owners: Array | None, tokens: Array) -> Array:
            hidden = activation(raised) if gated is None else activation(gated) * raised
            if rng is not None:
                hidden = _drop_by_token(rng, hidden, self.dropout_rate, tokens)
            return self._project(hidden, down, owners)

        def apply(
            inputs: Float[Array, "G M D"], owners: Int[Array, "G"] | None, tokens: Int[Array, "#G M"]
        ) -> Float[Array, "G M D"]:
            gated = None if gate is None else self._project(inputs, gate, owners)
            return contract(self._project(inputs, up, owners), gated, down, owners, tokens)

        return apply

    def _projection(self, name: str, inputs: int, outputs: int, init: Callable) -> tuple[Array, Array | None]:
        return StackedProjection(self.num_experts, inputs, outputs, self.use_bias, self.param_dtype, init, name=name)()

    def _project(self, x: Array, arrays: tuple[Array, Array | None], owners: Array | None) -> Array:
        """Blocks [G, M, inputs] to [G, M, outputs], each by its owner's kernel."""
        kernel, bias = arrays[0].astype(self.dtype), None if arrays[1] is None else arrays[1].astype(self.dtype)
        if owners is None:
            out = jnp.einsum("gmi,gio->gmo", x, kernel)
        else:
            out = grouped_matmul(x, kernel, owners)
            bias = None if bias is None else bias[owners]
        return out if bias is None else out + bias[:, None]


def _drop_by_token(rng: Array, x: Array, rate: float, tokens: Array) -> Array:
    """Dropout whose mask is a function of (rng, token), wherever the token stands among the blocks [G, M, H]."""
    keys = jax.vmap(jax.vmap(lambda token: jax.random.fold_in(rng, token)))(tokens)
    keep = jax.vmap(jax.vmap(lambda key: jax.random.bernoulli(key, 1.0 - rate, (x.shape[2],))))(keys)
    return jnp.where(keep, x / (1.0 - rate), jnp.zeros_like(x))
