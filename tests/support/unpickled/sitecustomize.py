"""For PYTHONPATH: records which modules unpickle data in this program, in the file $WRITTEN_DOWN."""

import os
import pickle
import sys
import traceback
from typing import Any


def write_down() -> None:
    """Write down the modules on the call stack, from the outermost."""
    if path := os.environ.get("WRITTEN_DOWN"):
        frames = [frame.f_globals.get("__name__", "?") for frame, _ in traceback.walk_stack(sys._getframe(2))]
        way = " ".join(dict.fromkeys(reversed(frames)))
        with open(path, "a") as file:
            file.write(f"{os.getpid()} unpickle {way}\n")


class Unpickler(pickle.Unpickler):
    def load(self) -> Any:
        write_down()
        return super().load()


def told(real: Any) -> Any:
    def instead(*arguments: Any, **options: Any) -> Any:
        write_down()
        return real(*arguments, **options)

    return instead


# Whatever it reads, and before anybody can have taken them; the event is that of a class or function in it, by any way.
pickle.Unpickler, pickle.load, pickle.loads = Unpickler, told(pickle.load), told(pickle.loads)  # type: ignore[misc]
sys.addaudithook(lambda event, _: write_down() if event == "pickle.find_class" else None)
