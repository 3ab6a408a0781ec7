"""Heads: from hidden states to the logits of tokens, and from the first one to whether a text follows another."""

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxformer.functional import compute_dtype, pool_tokens
from jaxformer.layers import ACTIVATIONS, Projection, TokenEmbedding, project
from jaxformer.models.block import make_norm
from jaxformer.models.config import TransformerConfig
from jaxformer.models.initializers import make_kernel_init


class TokenHead(nn.Module):
    """The output head: the transposed token embedding or a kernel of its own, and what stands before and behind it.

    logits = f(h) W + b. With ``head_transform`` f is norm(activation(h T + t)) (Devlin et al. 2019, arXiv:1810.04805,
    in the authors' code), with ``scale_logits`` f is h / sqrt(embed_dim) (Raffel et al. 2020, arXiv:1910.10683, in its
    code, mesh-tensorflow); b is there with ``head_bias``.

    Args:
      config: the model's configuration.
    """

    config: TransformerConfig

    def setup(self) -> None:
        """Declare the parts that the config asks for."""
        config = self.config
        if config.head_transform:
            self.head_transform = _projection(config, config.output_dim, config.output_dim, config.use_bias)
            if config.norm != "none":
                self.head_norm = make_norm(config, None)
        if not config.tie_embeddings:
            self.output_head = _projection(config, config.output_dim, config.vocab_rows)
        if config.head_bias:
            self.head_bias = TokenBias(config)
        # Of the tokens after the next: ``future_2_head``, ….
        self.future = {
            f"{token}_head": _projection(config, config.output_dim, config.vocab_rows)
            for token in range(2, config.num_future_tokens + 1)
        }

    def __call__(self, hidden: Float[Array, "B L D"], table: TokenEmbedding | None) -> Float[Array, "B L V"]:
        """Float32 logits [B, L, vocab_size] of hidden states; ``table`` is the token embedding of a tied head."""
        config = self.config
        if config.head_transform:
            activation, _ = ACTIVATIONS[config.activation]
            hidden = activation(self.head_transform(hidden))
            if config.norm != "none":
                hidden = self.head_norm(hidden)
        if config.scale_logits:
            hidden = hidden * config.embed_dim**-0.5
        if table is not None:
            logits = table.attend(hidden)
        else:
            kernel, _ = self.output_head.arrays()
            wide = jnp.promote_types(hidden.dtype, jnp.float32)
            logits = jnp.einsum("...d,dv->...v", hidden, kernel.astype(hidden.dtype), preferred_element_type=wide)
            logits = logits[..., : config.vocab_size]
        return self.head_bias(logits) if config.head_bias else logits

    def kernel(self, table: TokenEmbedding | None) -> Float[Array, "D V"]:
        """The one array of a head that is a product alone, [output_dim, vocab_rows], with the scale of logits in it."""
        for name in ("head_transform", "head_bias"):
            if getattr(self.config, name):
                raise ValueError(
                    f"{name}=True: the output head is not a kernel alone, so that losses need whole logits (no "
                    "chunk_size, no intermediate losses), of the wanted positions by select"
                )
        kernel = self.output_head.arrays()[0] if table is None else table.embedding.T
        return kernel * self.config.embed_dim**-0.5 if self.config.scale_logits else kernel

    def future_kernels(self) -> list[Float[Array, "D V"]]:
        """Kernels of the tokens after the next, in order."""
        return [head.arrays()[0] for head in self.future.values()]


class TokenBias(nn.Module):
    """A bias for each token of the vocabulary: ``bias`` [vocab_rows].

    Args:
      config: the model's configuration.
    """

    config: TransformerConfig

    @nn.compact
    def __call__(self, logits: Float[Array, "B L V"]) -> Float[Array, "B L V"]:
        """Add the biases of the tokens that exist."""
        config = self.config
        bias = self.param("bias", nn.initializers.zeros, (config.vocab_rows,), config.parameter_dtype)
        return logits + bias[None, None, : config.vocab_size].astype(logits.dtype)


class SentenceHead(nn.Module):
    """The pooler, tanh of a projection of the first token's state, and the head that says whether a text follows.

    Devlin et al. 2019, "BERT", arXiv:1810.04805, section 3.1, task 2.

    Args:
      config: the model's configuration.
    """

    config: TransformerConfig

    def setup(self) -> None:
        """Declare both projections."""
        config = self.config
        self.pooler = _projection(config, config.output_dim, config.output_dim, config.use_bias)
        self.next_sentence_head = _projection(config, config.output_dim, 2, config.use_bias)

    def __call__(self, hidden: Float[Array, "B L D"], real: Bool[Array, "B L"] | None) -> Float[Array, "B 2"]:
        """Float32 logits of 0 = follows and 1 = was drawn at random; ``real`` says which tokens exist."""
        pooled = self.pooled(hidden, real)
        return project(pooled, *self.next_sentence_head.arrays(), dtype=compute_dtype(pooled.dtype))

    def pooled(self, hidden: Float[Array, "B L D"], real: Bool[Array, "B L"] | None) -> Float[Array, "B D"]:
        """The pooler's output for the first real token [B, output_dim]."""
        return jnp.tanh(self.pooler(pool_tokens(hidden, real, pooling="first")))


def _projection(config: TransformerConfig, inputs: int, outputs: int, use_bias: bool = False) -> Projection:
    return Projection(
        inputs,
        outputs,
        use_bias=use_bias,
        dtype=config.compute_dtype,
        param_dtype=config.parameter_dtype,
        kernel_init=make_kernel_init(config),
    )
