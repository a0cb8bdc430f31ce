"""`flax-attn plan`: what training or generation would take on chips that are not at hand."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flax_attn.cli import common
from flax_attn.convert.replacing import replacing

if TYPE_CHECKING:
    from flax_attn.cli.specs import Loader
    from flax_attn.plan.job import Job
    from flax_attn.plan.models import PlannedModel
    from flax_attn.plan.plan import Plan


def add(commands: Any) -> None:
    """Add the command."""
    plan = commands.add_parser(
        "plan",
        help="say what training or generation would take on TPUs or GPUs that are not at hand",
        description=(
            "Compile ahead of time for chips that are not at hand, and print what one of them would"
            " hold, compute and send, whether it fits, and what would. No weights are read. TPUs"
            " need libtpu (flax-attn[tpu]), GPUs flax-attn[aot-gpu] and a C compiler."
        ),
    )
    plan.add_argument(
        "--model",
        required=True,
        metavar="NAME",
        help=(
            "gpt2, llama3-8b, mixtral-8x7b, ..., a folder with config.json, or FILE.py:NAME, a"
            " function that makes a module of your own, from ids (b, t) to logits"
        ),
    )
    plan.add_argument(
        "--topology",
        required=True,
        metavar="CHIP:SHAPE",
        help="v5e:16x16, v6e:16x16, v5p:4x4x4, tpu7x:4x4x4, h200:8, cpu:8",
    )
    plan.add_argument(
        "--mesh",
        required=True,
        metavar="AXIS=SIZE,...",
        help="of data, fsdp, tensor, context, expert: data=4,fsdp=64",
    )
    plan.add_argument(
        "--batch",
        required=True,
        type=common.count,
        metavar="B",
        help="sequences of all chips together",
    )
    plan.add_argument(
        "--tokens", required=True, type=common.count, metavar="T", help="of each sequence"
    )
    what = plan.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--train", action="store_true", help="a step of training with AdamW, its state in float32"
    )
    what.add_argument(
        "--generate", action="store_true", help="the prompt, and one more token behind it"
    )
    plan.add_argument(
        "--layers", type=common.count, metavar="N", help="only the first N layers of the model"
    )
    plan.add_argument(
        "--remat", action="store_true", help="recompute each block in the backward pass"
    )
    plan.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        help="of the parameters (default bfloat16; a module of your own decides itself)",
    )
    plan.add_argument(
        "--rule",
        action="append",
        default=[],
        metavar="NAME=AXIS,...",
        help=(
            "split the axes of this name over these of the mesh: embed=fsdp,context; may be"
            " repeated"
        ),
    )
    plan.add_argument(
        "--backend", default="auto", metavar="NAME", help="of the attention calls (default auto)"
    )
    plan.add_argument(
        "--memory",
        type=float,
        metavar="GIB",
        help="of a device, if not what is published for the chip",
    )
    plan.add_argument("--json", metavar="FILE", help="write all of it to FILE")
    plan.add_argument(
        "--markdown", action="store_true", help="print it as one line of a table in Markdown"
    )
    plan.set_defaults(run=_plan)


def _plan(options: argparse.Namespace) -> int:
    from flax_attn.cli.specs import CannotCompareError, Loader
    from flax_attn.plan.plan import plan

    # Programs for a pod take minutes to compile.
    common.check_writable(options.json)
    status = common.status("reading the model")
    refused = common.usage_errors(CannotCompareError, ImportError, ValueError, OSError)
    with refused, Loader() as loader, status:
        found = plan(_job(options, loader), status.update)
    _print(found, options.markdown)
    if options.json:
        with replacing(options.json) as whole:
            whole.write_text(json.dumps(found.as_dict(), indent=1) + "\n", encoding="utf-8")
    return 0


def _job(options: argparse.Namespace, loader: Loader) -> Job:
    from flax_attn.plan.job import Job, parse_mesh, parse_rules
    from flax_attn.plan.topology import topology

    where = topology(options.topology)
    # A part of the memory may be somebody else's, or not be published.
    if options.memory:
        where = replace(where, chip=replace(where.chip, memory=round(options.memory * 2**30)))
    name, model = _model(options, loader)
    return Job(
        name,
        model,
        where,
        parse_mesh(options.mesh),
        options.batch,
        options.tokens,
        train=options.train,
        remat=options.remat,
        dtype=options.dtype,
        backend=options.backend,
        rules=parse_rules(options.rule),
    )


def _model(options: argparse.Namespace, loader: Loader) -> tuple[str, PlannedModel]:
    from flax_attn.plan.models import OwnModel, find_decoder

    if ":" in options.model:
        if options.layers:
            raise ValueError(
                "--layers takes the first layers of a model that is known by name or folder; got"
                f" --model {options.model}. Name a function that makes a model of fewer layers"
            )
        return options.model, OwnModel(loader.factory(options.model))
    name, model = find_decoder(options.model)
    # A table names the layers, so that nobody takes it for one of the whole model.
    if options.layers:
        name += f", {options.layers} layers"
    return name, model.first_layers(options.layers)


def _print(plan: Plan, markdown: bool) -> None:
    from flax_attn.plan import report

    # With its heading, so that one line is a table; `make plan` keeps the first heading alone.
    if markdown:
        print("\n".join([*report.markdown_heading(), report.markdown_row(plan)]))
        return
    console = common.console(120)
    console.print(report.title(plan), style="bold", highlight=False)
    for table in report.tables(plan):
        console.print(table)
    console.print(report.LEGEND, style="dim", highlight=False)
