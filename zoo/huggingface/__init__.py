"""Models of the Hugging Face Hub: hf://ORG/NAME[@REVISION].

repository: ids, downloads, errors; push: uploads; model_card: README.md of a repository; signing: signatures of files
"""
