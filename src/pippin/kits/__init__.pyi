from . import image as image, text as text
