from lightning_memtools.memory.sizes import parse_size
def parse_capacity(text):
    if text == "RTX 4090": return 25282281472
    return parse_size(text)
