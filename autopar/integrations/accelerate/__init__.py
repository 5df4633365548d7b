"""accelerate around a parallelized model: patches of it (:mod:`.calls`), and which model a call means."""
