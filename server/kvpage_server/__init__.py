"""The two programs of a kvpage service: the API process (`serve`) and the device worker (`worker`)."""
