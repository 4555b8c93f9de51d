"""What makes a request's KV its own, in the allocator's terms."""

from __future__ import annotations

import json

from kvproof.allocator import MediaItem, Namespace
from kvproof.allocator.hashing import SHARED
from kvproof.backend.integrations.vllm.seam import Request


def namespace_of(request: Request) -> Namespace:
    """The request's salt and its adapter, by name and path: a name that is given to other weights is another one."""
    lora = request.lora_request
    if lora is None and not request.cache_salt:
        return SHARED
    adapter = None if lora is None else json.dumps([lora.lora_name, lora.lora_path])
    return Namespace(salt=request.cache_salt or None, adapter=adapter)


def media_of(request: Request) -> list[MediaItem]:
    """The request's multimodal inputs. Such as overlap, a video and its sound, become one item that names them all."""
    media: list[MediaItem] = []
    for feature in sorted(request.mm_features, key=lambda feature: int(feature.mm_position.offset)):
        start, length = feature.mm_position.offset, feature.mm_position.length
        item = MediaItem(feature.identifier, start, length)
        if media and start < media[-1].stop:
            other = media.pop()
            key = json.dumps([[other.key, other.start, other.length], [item.key, start, length]])
            item = MediaItem(key, other.start, max(other.stop, item.stop) - other.start)
        media.append(item)
    return media
