"""A stand-in for the CUDA driver: see build.py, control.py and fake_driver.cpp."""
