from . import images as images, synthetic as synthetic, tables as tables, text as text
from .corpus import Corpus as Corpus
from .image_files import image_grid as image_grid, write_image as write_image, write_video as write_video
from .images import ImageSet as ImageSet
from .injection import Injected as Injected
from .random_batches import RandomBatches as RandomBatches
from .records import TrainingRecord as TrainingRecord, read_records as read_records
from .streams import DataStream as DataStream, Mixture as Mixture
from .text.chat_template import ChatTemplate as ChatTemplate
from .text.tokenizer import Tokenizer as Tokenizer
from .token_batches import TokenBatch as TokenBatch
