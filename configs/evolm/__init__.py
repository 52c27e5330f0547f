"""The paper's main experiment, and the same with two models and with judges of other sizes."""
