"""100 users on the shape of LLaMA-2-7B, whose 32 heads of keys and values take four times Llama-3-8B's cache."""

from pathlib import Path

from benchmarks.gpu_check.bounds import Bounds
from benchmarks.gpu_check.datasheets import find_limits
from benchmarks.gpu_check.names import LLAMA_2
from benchmarks.gpu_check.parts import Setting
from benchmarks.gpu_check.record import Recorder
from benchmarks.gpu_check.serving import EngineBench, running_engine, serving_config
from benchmarks.gpu_check.shapes import write_model
from benchmarks.gpu_check.timing import pick_device
from engine.models.families import read_model_config
from server.process import event_loop


def run(recorder: Recorder, setting: Setting) -> None:
    """The start of the engine belongs to the case: without it there is nothing to measure."""
    device = pick_device(setting.tiny).type
    folder = write_model(LLAMA_2, setting.folder, setting.tiny)
    recorder.case(f"{LLAMA_2}, 100 users", lambda: event_loop.run(_measure(recorder, setting, folder, device)),
                  seconds=90)  # fmt: skip


async def _measure(recorder: Recorder, setting: Setting, folder: Path, device: str) -> None:
    bounds = Bounds(read_model_config(folder), find_limits(setting, recorder))
    config = serving_config(folder, device, setting.tiny)
    async with running_engine(config, setting.folder / "watched-users.json") as driver:
        await EngineBench(recorder, setting, driver, bounds, f"{LLAMA_2}, ").users()
