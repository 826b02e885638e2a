"""What the library costs against what a user would pick instead, and the training job that shows it at work."""
