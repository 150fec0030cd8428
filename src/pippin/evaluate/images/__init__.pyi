from .features import (
    Features as Features,
    Pixels as Pixels,
    TrainedFeatures as TrainedFeatures,
    scene_features as scene_features,
    train_features as train_features,
)
from .inception import InceptionFeatures as InceptionFeatures
from .sample_quality import (
    SampleQuality as SampleQuality,
    compare as compare,
    energy_ratio as energy_ratio,
    frechet_distance as frechet_distance,
    frechet_extrapolated as frechet_extrapolated,
    kernel_distance as kernel_distance,
    precision_recall as precision_recall,
)
