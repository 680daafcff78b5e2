"""Operations on tensors: their bytes, copies between devices and dtypes, quantized tensors, blocking staging."""
