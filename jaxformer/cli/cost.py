"""Tell what a config's model costs, before anything is trained: by part, in training and generation.

    jaxformer cost --config=language_model:size=base
    jaxformer cost --config=language_model:size=base --config.data.length=4096 --config.train.batch_size=8
    jaxformer cost --config=masked_lm --device=h100 --json
    jaxformer cost --config=language_model --peak_flops=197e12 --bandwidth=819e9

Parameters, operations of products a token (exact), activations kept for the backward pass, memory of the training state
and of the decoding cache. With a device's peak figures, the least time of each phase and what bounds it. Nothing is
computed; --compiled asks the compiler of this machine for its memory too, which takes as long as it compiles.
"""

import argparse

SUMMARY = "tell what a config's model costs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags."""
    parser.add_argument("--config", metavar="F[:arg]", required=True, help="config file or bundled name")
    parser.add_argument("--device", metavar="X", help="its peak figures: a100, h100, h200, l4, t4, tpu_v4, tpu_v5e, …")
    parser.add_argument("--peak_flops", type=float, metavar="N", help="or your own: products' operations a second")
    parser.add_argument("--bandwidth", type=float, metavar="N", help="and bytes of memory a second")
    parser.add_argument("--compiled", action="store_true", help="also memory as compiled for this machine")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--config.a.b", metavar="v", dest="_", help="set a field of the config; repeatable")
    parser.set_defaults(takes_overrides=True)


def run(arguments: argparse.Namespace) -> None:
    """Prints the table or the figures."""
    import os

    if not arguments.compiled:  # shapes need no accelerator, nor are its kernels' products seen in a trace
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from jaxformer.analysis.roofline import choose_device, roofline
    from jaxformer.cli.output import print_result
    from jaxformer.training.config import load_config
    from jaxformer.training.cost_table import cost_table
    from jaxformer.training.run_cost import run_cost, run_figures

    device = choose_device(arguments.device, arguments.peak_flops, arguments.bandwidth)
    cost = run_cost(load_config(arguments.config, arguments.overrides), compiled=arguments.compiled)
    bounds = None if device is None else roofline(cost.model, device)
    if arguments.json:
        print_result(run_figures(cost, bounds))
    else:
        print(cost_table(cost, arguments.device or "such a device", bounds))
