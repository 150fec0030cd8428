from .diffusion import Denoising as Denoising, Diffusion as Diffusion, DiffusionConfig as DiffusionConfig
from .dit import DiT as DiT, DiTConfig as DiTConfig
from .gaussian_mixture import GaussianMixture as GaussianMixture, exact_denoiser as exact_denoiser
from .local_network import LocalNet as LocalNet, LocalNetConfig as LocalNetConfig
from .samplers import Langevin as Langevin
from .schedules import NoiseSchedule as NoiseSchedule
from .unet import UNet as UNet, UNetConfig as UNetConfig
