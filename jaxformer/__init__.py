"""jaxformer: the Transformer family in JAX and Flax.

Nothing heavy is imported here: take what you need from ``jaxformer.functional``, ``jaxformer.attention``,
``jaxformer.layers``, ``jaxformer.models``, ``jaxformer.inference`` or ``jaxformer.training``.
"""

__version__ = "0.1.0"
