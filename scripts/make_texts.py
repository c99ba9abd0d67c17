"""Write the phonemes of the English text set (voxfuse/e2e/texts/english.jsonl) with the G2P of hibari-tts 0.2.1.

Edit texts in that file, leave ``phonemes`` out or as they are, and run ``python scripts/make_texts.py``. With
``--check`` nothing is written, and the exit status is 1 where the file is not what this script would write.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from voxfuse.e2e import texts
from voxfuse.e2e.stack import Text
from voxfuse.e2e.stacks.kokoro import phonemize


def main() -> int:
    path = Path(texts.__file__).with_name("english.jsonl")
    before = path.read_bytes()
    entries = [msgspec.json.decode(line, type=Text) for line in before.splitlines()]
    after = b"".join(
        msgspec.json.encode(
            {
                "id": f"en-{number:03d}",
                "text": entry.text,
                "phonemes": phonemize(entry.text),
                "tags": entry.tags,
            }
        )
        + b"\n"
        for number, entry in enumerate(entries, start=1)
    )
    if "--check" in sys.argv[1:]:
        return int(after != before)
    path.write_bytes(after)
    print(f"{len(entries)} texts written to {path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
