"""The gate on the tone stack: one run in a folder, and what its verdict says."""

import json

from tone_stack import TEXTS, TonePatches, ToneReader, ToneStack

from voxfuse.e2e.gate import generate
from voxfuse.e2e.protocol import declare, load_protocol
from voxfuse.e2e.score import score

COUNT = 12


def silent(_phase, _done, _total):
    pass


def protocol_of(sentences=COUNT, **sections):
    """The smoke protocol with changes by section, fewer sentences, a margin that these can carry, faster resampling."""
    content = json.loads(json.dumps(load_protocol("smoke", sentences=sentences).content))
    content["wer"] |= {"margin_pp": 5.0, "ceiling_pp": 20.0, "resamples": 200}
    content["throughput"] |= {"block_sentences": 2, "aa_pairs": 3, "pairs": 3}
    for section, change in sections.items():
        content[section] |= change
    return declare(content)


class Case:
    """One run in a folder, repeated as often as wanted."""

    def __init__(self, path):
        self.path, self.stack, self.reader = path, ToneStack(), ToneReader()

    def speak(self, change=lambda audio: audio, declared=None, device="cpu", extend=False, **patches):
        declared = declared or protocol_of()
        return generate(
            self.stack,
            lambda left_out: TonePatches(self.stack, change, **patches),
            declared,
            TEXTS[: declared.protocol.sentences],
            self.path,
            silent,
            device=device,
            backend="reference",
            extend=extend,
        )

    def verdict(self, *args, **kwargs):
        return score(self.speak(*args, **kwargs), self.reader, silent)


def outcomes(verdict):
    return {guard.name: guard.outcome for guard in verdict.guards}


def failed(verdict):
    return {guard.name for guard in verdict.guards if guard.outcome == "fail"}
