"""Replaying request streams against page layouts: how many requests run at once in the same memory."""
