"""The price of a token forgets MLA's rotated key, which is cached beside the latent."""

from minillm.config import ModelConfig

right = ModelConfig.kv_values_per_token.fget


def kv_values_per_token(self):
    return self.mla.kv_lora_rank if self.mla else right(self)


ModelConfig.kv_values_per_token = property(kv_values_per_token)
