"""Exporting: one captured program, every format from it, and reports of where its time goes."""

from pippin.shape.export.asset import Function, ModelAsset
from pippin.shape.export.compiled import CompiledModel
from pippin.shape.export.compress import Joint, Linear, Palettize, Prune
from pippin.shape.export.decoder import capture_decoder
from pippin.shape.export.dispatch import Choice, dispatch
from pippin.shape.export.interface import generate_interface
from pippin.shape.export.report import PerformanceReport, Variant, profile
from pippin.shape.export.signature import Port, Range, Signature

__all__ = [
    "Choice",
    "CompiledModel",
    "Function",
    "Joint",
    "Linear",
    "ModelAsset",
    "Palettize",
    "PerformanceReport",
    "Port",
    "Prune",
    "Range",
    "Signature",
    "Variant",
    "capture_decoder",
    "dispatch",
    "generate_interface",
    "profile",
]
