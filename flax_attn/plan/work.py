"""The operations of the programs of a job, on all devices together."""

from flax import nnx

from flax_attn.modules.work import Work, work
from flax_attn.plan.job import Job


def training(job: Job, model: nnx.Module) -> Work:
    """Return the operations of a training step: forward, and twice that for the gradients.

    What is recomputed under `remat` is not asked for by the model, and is left out.
    """
    return 3 * prefill(job, model)


def prefill(job: Job, model: nnx.Module) -> Work:
    """Return the operations of a forward pass over all tokens."""
    return job.model.forward_work(job, model)


def decoding(job: Job, model: nnx.Module) -> Work:
    """Return the operations of one more token for each sequence, behind a cache of all tokens."""
    return job.batch * work(model, 1, job.tokens)
