"""Operations on tensors: bytes, copies between devices and dtypes, quantized tensors, blocking staging."""
