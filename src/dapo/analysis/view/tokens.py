"""The text of each token of a response, by the tokenizer of the run's model, which is loaded on first use."""

import codecs
import re
import threading
from collections.abc import Iterable, Mapping
from typing import Any

from dapo.data.byte_level import byte_alphabet

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenTexts:
    """Loads the tokenizer of a run in the background, without weights and without code that comes with a model."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._model = config.get("model.name")
        self._worker: threading.Thread | None = None
        self._tokenizer: Any = None
        self._state = "loading"

    def state(self) -> str:
        """`ready`, `loading`, or the reason why there are no token texts. The first call starts loading."""
        if self._worker is None:
            self._worker = threading.Thread(target=self._load, daemon=True)
            self._worker.start()
        return self._state

    def wait(self) -> str:
        """The state after loading has ended."""
        self.state()
        assert self._worker is not None
        self._worker.join()
        return self._state

    def texts(self, ids: Iterable[int]) -> list[str]:
        """The text of each token; joined, they are the text of all. Bytes that are no UTF-8 are U+FFFD.

        A character whose bytes are spread over several tokens belongs to the last of them.
        """
        alphabet = byte_alphabet()
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        tokens = self._tokenizer.convert_ids_to_tokens([int(token) for token in ids])
        is_byte_level = type(getattr(self._tokenizer.backend_tokenizer, "decoder", None)).__name__ == "ByteLevel"
        pieces = [decoder.decode(_bytes_of(token, alphabet if is_byte_level else {})) for token in tokens]
        if rest := decoder.decode(b"", final=True):
            pieces[-1] += rest
        return pieces

    def _load(self) -> None:
        try:
            from dapo.policy.model import load_local_tokenizer

            found = load_local_tokenizer(str(self._model))
        except Exception as error:  # a damaged tokenizer must not end the page, which then has no colours
            self._state = f"The tokenizer of {self._model} cannot be loaded: {type(error).__name__}: {error}"
            return
        if found is None:
            self._state = (
                f"The tokenizer of {self._model} is not on this machine, or comes with its own code, "
                "which the page does not run."
            )
        elif not hasattr(found[0], "backend_tokenizer"):
            self._state = f"The tokenizer of {self._model} does not give the text of single tokens."
        else:
            self._tokenizer, self._state = found[0], "ready"


def _bytes_of(token: str | None, alphabet: Mapping[str, int]) -> bytes:
    """The UTF-8 bytes of a vocabulary's token; none for an unknown id."""
    if token is None:
        return b""
    if alphabet:
        known = all(character in alphabet for character in token)
        return bytes(alphabet[character] for character in token) if known else token.encode()
    if match := _BYTE_TOKEN.fullmatch(token):
        return bytes([int(match[1], 16)])
    return token.replace("\u2581", " ").encode("utf-8", "replace")
