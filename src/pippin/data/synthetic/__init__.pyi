from . import (
    documents as documents,
    label_sets as label_sets,
    scenes as scenes,
    sprites as sprites,
    tool_requests as tool_requests,
    video_clips as video_clips,
)
from .scenes import Scenes as Scenes, SceneSpec as SceneSpec
from .sprites import Sprites as Sprites, SpriteSpec as SpriteSpec
from .video_clips import VideoClips as VideoClips, VideoClipSpec as VideoClipSpec
