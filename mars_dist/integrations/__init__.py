"""The only part that imports or patches DeepSpeed, Accelerate and transformers: how MARS gets into them.

Each integration registers by itself and lazily: nothing is imported before somebody else imports it.
"""

from mars_dist.integrations import accelerate, deepspeed, trainer


def register_when_imported() -> None:
    """What ``import mars_dist`` does: ``register()``, with torch's part of it as soon as torch is imported."""
    deepspeed.register_with_torch()
    accelerate.register()
    trainer.register()


def register() -> None:
    """Make MARS known to DeepSpeed's configuration, to Accelerate and to the Trainer's ``optim``. Idempotent.

    Raises:
        RuntimeError: when ``torch.optim`` already has another class under one of the names of MARS, which a DeepSpeed
            configuration that asks for MARS would silently train with.
    """
    deepspeed.register()
    accelerate.register()
    trainer.register()


def unregister() -> None:
    """Undo ``register()``: the import hook, torch, DeepSpeed, Accelerate and transformers are as before."""
    trainer.unregister()
    accelerate.unregister()
    deepspeed.unregister()
