"""kokoro imported without its text front end."""

import importlib.util
import subprocess
import sys
import textwrap

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("kokoro") is None, reason="needs kokoro"),
]


def run(code: str, hide: str = "misaki") -> None:
    """Run code in a fresh interpreter where one top-level package cannot be found."""
    prelude = f"""
    import importlib.util, sys
    class Hide:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] == {hide!r}:
                raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
    sys.meta_path.insert(0, Hide())
    find = importlib.util.find_spec
    importlib.util.find_spec = lambda name, *rest: None if name == {hide!r} else find(name, *rest)
    from voxfuse.patches._kokoro_import import load_kokoro
    """
    program = textwrap.dedent(prelude) + textwrap.dedent(code)
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_model_without_text_front_end():
    run(
        """
        load_kokoro()
        import kokoro, kokoro.istftnet
        from kokoro import KModel
        assert KModel is sys.modules["kokoro.model"].KModel
        assert kokoro.Decoder is kokoro.istftnet.Decoder
        assert not {"misaki", "spacy", "kokoro.pipeline"} & set(sys.modules)
        try:
            from kokoro import KPipeline
        except ModuleNotFoundError as error:
            assert error.name == "misaki", error
        else:
            raise AssertionError("KPipeline without misaki")
        """
    )


def test_an_imported_kokoro_is_left_alone():
    run(
        """
        import types, pathlib
        folder = pathlib.Path(find("kokoro").origin).parent
        mine = types.ModuleType("kokoro")
        mine.__path__ = [str(folder)]
        sys.modules["kokoro"] = mine
        load_kokoro()
        assert sys.modules["kokoro"] is mine and mine.model.KModel and not hasattr(mine, "KModel")
        """
    )


def test_without_kokoro_it_says_what_to_install():
    run(
        """
        try:
            load_kokoro()
        except ImportError as error:
            assert "pip install --no-deps kokoro" in str(error), error
            assert "kokoro" not in sys.modules
        else:
            raise AssertionError("imported what is absent")
        """,
        hide="kokoro",
    )


def test_without_what_the_model_needs_nothing_half_done_stays():
    run(
        """
        try:
            load_kokoro()
        except ImportError as error:
            assert "transformers" in str(error), error
            assert "kokoro" not in sys.modules
        else:
            raise AssertionError("imported without transformers")
        """,
        hide="transformers",
    )
