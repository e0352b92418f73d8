"""Images, sounds, texts and tokens of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from purevk.errors import InputError


class _Elements:
    """Elements of a dense tensor, uint8 or float32, with its sizes."""

    def __init__(self, data: Any, sizes: tuple[int, ...]) -> None:
        elements = np.asarray(data)
        if elements.dtype != np.float32:
            is_bytes = elements.dtype.kind in "iub" and (
                not elements.size or (elements.min() >= 0 and elements.max() <= 255)
            )
            elements = elements.astype(np.uint8 if is_bytes else np.float32)
        if elements.size != int(np.prod(sizes)):
            raise InputError(
                f"{elements.size} elements are given", why=f"sizes {list(sizes)} are expected"
            )
        self._elements, self._sizes = elements.reshape(-1), sizes

    def is_uint8(self) -> bool:
        """Whether the elements are uint8."""
        return self._elements.dtype == np.uint8

    def is_float(self) -> bool:
        """Whether the elements are float32."""
        return self._elements.dtype == np.float32

    @property
    def uint8_data(self) -> list[int]:
        """The elements. Raises InputError if they are float32."""
        return self._as(np.uint8)

    @property
    def float_data(self) -> list[float]:
        """The elements. Raises InputError if they are uint8."""
        return self._as(np.float32)

    def _as(self, dtype: type) -> list[Any]:
        if self._elements.dtype != dtype:
            raise InputError(f"the elements are {self._elements.dtype}")
        elements: list[Any] = self._elements.tolist()
        return elements

    def array(self) -> np.ndarray:
        """The elements, with their sizes."""
        return self._elements.reshape(self._sizes)


class Image(_Elements):
    """An image: uint8 or float32 [channels, height, width].

    Args:
        data: the elements in this order, as a list or an array.
    """

    def __init__(self, data: Any = (), width: int = 0, height: int = 0, channels: int = 0) -> None:
        super().__init__(data, (channels, height, width))
        self.channels, self.height, self.width = self._sizes

    def __repr__(self) -> str:
        return (
            f"<Image height={self.height} width={self.width} channels={self.channels}"
            f" dtype={self._elements.dtype}>"
        )


class Audio(_Elements):
    """A preprocessed sound: uint8 or float32 [batch_size, n_bins, n_frames]."""

    def __init__(
        self, data: Any = (), batch_size: int = 0, n_bins: int = 0, n_frames: int = 0
    ) -> None:
        super().__init__(data, (batch_size, n_bins, n_frames))
        self.batch_size, self.n_bins, self.n_frames = self._sizes

    def __repr__(self) -> str:
        return (
            f"<Audio batch_size={self.batch_size} n_bins={self.n_bins} n_frames={self.n_frames}"
            f" dtype={self._elements.dtype}>"
        )


class RawAudio:
    """A sound: uint8 [batch_size, n_channels, n_samples]. No runner takes one: preprocess it."""

    def __init__(
        self, data: Any = (), batch_size: int = 0, n_channels: int = 0, n_samples: int = 0
    ) -> None:
        self.data = np.asarray(data, np.uint8).reshape(-1).tolist()
        self.batch_size, self.n_channels, self.n_samples = batch_size, n_channels, n_samples

    def __repr__(self) -> str:
        return (
            f"<RawAudio batch_size={self.batch_size} n_channels={self.n_channels}"
            f" n_samples={self.n_samples}>"
        )


class MultimodalInput:
    """A part of a prompt: a text, token ids, an image or a sound.

    Raises:
        InputError: it is none of these.
    """

    def __init__(self, content: Any = None, /, **named: Any) -> None:
        if content is None and len(named) == 1:
            content = next(iter(named.values()))
        kinds = {str: "text", Image: "image", Audio: "audio", RawAudio: "raw_audio"}
        kind = kinds.get(type(content))
        if kind is None and _are_tokens(content):
            kind, content = "tokens", [int(token) for token in content]
        if kind is None or (named and kind not in named):
            raise InputError(
                f"{repr(content)[:80]} is no part of a prompt",
                why="a text, token ids, an Image, an Audio or a RawAudio is expected",
            )
        self._kind, self._content = kind, content

    def is_text(self) -> bool:
        """Whether it is a text."""
        return self._kind == "text"

    def is_tokens(self) -> bool:
        """Whether it is token ids."""
        return self._kind == "tokens"

    def is_image(self) -> bool:
        """Whether it is an image."""
        return self._kind == "image"

    def is_audio(self) -> bool:
        """Whether it is a preprocessed sound."""
        return self._kind == "audio"

    def is_raw_audio(self) -> bool:
        """Whether it is a sound that was not preprocessed."""
        return self._kind == "raw_audio"

    def get_text(self) -> str | None:
        """The text; None if it is none."""
        return self._content if self.is_text() else None

    def get_tokens(self) -> list[int] | None:
        """The token ids; None if it is none."""
        return list(self._content) if self.is_tokens() else None

    def get_image(self) -> Image | None:
        """The image; None if it is none."""
        return self._content if self.is_image() else None

    def get_audio(self) -> Audio | None:
        """The preprocessed sound; None if it is none."""
        return self._content if self.is_audio() else None

    def get_raw_audio(self) -> RawAudio | None:
        """The sound; None if it is none."""
        return self._content if self.is_raw_audio() else None

    def __repr__(self) -> str:
        if not self.is_text():
            return f"<MultimodalInput type={self._kind}>"
        dots = "..." if len(self._content) > 50 else ""
        return f'<MultimodalInput type=text content="{self._content[:50]}{dots}">'


def _are_tokens(content: Any) -> bool:
    if isinstance(content, np.ndarray):
        return content.ndim == 1 and content.dtype.kind in "iu" and bool((content >= 0).all())
    if not isinstance(content, Sequence) or isinstance(content, (str, bytes)):
        return False
    return all(
        isinstance(token, (int, np.integer)) and not isinstance(token, bool) and token >= 0
        for token in content
    )


def make_text_input(text: str) -> MultimodalInput:
    """A text as a part of a prompt."""
    return MultimodalInput(text=text)


def make_token_input(tokens: Sequence[int]) -> MultimodalInput:
    """Token ids as a part of a prompt."""
    return MultimodalInput(tokens=list(tokens))


def make_image_input(image_tensor: Any) -> MultimodalInput:
    """An image as a part of a prompt.

    Args:
        image_tensor: a numpy array or torch tensor, uint8 or float32: [channels, height, width],
            or [height, width, channels] if only the last size is 3 or 4; a leading dim of 1 may
            be there. It has 3 or 4 channels.

    Raises:
        InputError: it has other sizes or elements.
    """
    array = _array(image_tensor)
    if array.ndim == 4 and array.shape[0] == 1:
        array = array[0]
    if array.ndim != 3:
        raise InputError(
            f"an image has sizes {list(array.shape)}",
            why="it must be 3-dimensional, or 4-dimensional with a batch of 1",
        )
    if array.shape[0] not in (3, 4) and array.shape[2] in (3, 4):
        array = array.transpose(2, 0, 1)
    channels, height, width = array.shape
    if channels not in (3, 4):
        raise InputError(
            f"an image has sizes {list(array.shape)}",
            why="it must have 3 (RGB) or 4 (RGBA) channels",
        )
    return MultimodalInput(image=Image(array, width, height, channels))


def make_audio_input(audio_tensor: Any) -> MultimodalInput:
    """A preprocessed sound as a part of a prompt.

    Args:
        audio_tensor: a numpy array or torch tensor, uint8 or float32 [batch_size, n_bins, n_frames].

    Raises:
        InputError: it has other sizes or elements.
    """
    return MultimodalInput(audio=Audio(*_sound(audio_tensor, (np.uint8, np.float32))))


def make_raw_audio_input(audio_tensor: Any) -> MultimodalInput:
    """A sound as a part of a prompt.

    Args:
        audio_tensor: a numpy array or torch tensor, uint8 [batch_size, n_channels, n_samples].

    Raises:
        InputError: it has other sizes or elements.
    """
    return MultimodalInput(raw_audio=RawAudio(*_sound(audio_tensor, (np.uint8,))))


def _sound(tensor: Any, dtypes: tuple[type, ...]) -> tuple[Any, ...]:
    array = _array(tensor)
    if array.ndim != 3 or array.dtype not in dtypes:
        raise InputError(
            f"a sound is {array.dtype} {list(array.shape)}",
            why=f"it must be 3-dimensional, of {' or '.join(dtype.__name__ for dtype in dtypes)}",
        )
    return (array, *array.shape)


def _array(tensor: Any) -> np.ndarray:
    array = np.asarray(tensor.detach().cpu() if hasattr(tensor, "detach") else tensor)
    if array.dtype not in (np.uint8, np.float32):
        raise InputError(
            f"the elements are {array.dtype}", why="only uint8 and float32 are supported"
        )
    return array
