"""SGLang's engine class, as this machine needs it. Imported under the engine's own Python only."""


def engine_class(device: str) -> type:
    """SGLang's `Engine`; on a CPU one whose processes are forked, not started anew with every import (25 s each)."""
    import multiprocessing

    from sglang.srt.entrypoints.engine import Engine

    if device != "cpu":
        return Engine  # CUDA does not outlive a fork

    class ForkingEngine(Engine):
        @classmethod
        def _launch_scheduler_processes(cls, *arguments, **options):
            multiprocessing.set_start_method("fork", force=True)
            return super()._launch_scheduler_processes(*arguments, **options)

    return ForkingEngine
