"""On disk: Hugging Face directories in and out, without any rank holding the model."""

from distprune.checkpoint.digest import digest_together, file_digest
from distprune.checkpoint.hf_directory import HfDirectory, open_directory, read_weight_file, small_folders
from distprune.checkpoint.hf_load import load_model
from distprune.checkpoint.hf_save import ModelWriter, save_model
from distprune.checkpoint.hub import name_of_model, resolve_model
from distprune.checkpoint.inspect import InspectReport, TensorReport, inspect_directory
from distprune.checkpoint.load_save import load, mesh_of, save
from distprune.checkpoint.new_file import check_file, writing_file
from distprune.checkpoint.one_file import fill_from_file, write_together
from distprune.checkpoint.optional_packages import import_extra
from distprune.checkpoint.output_directory import check_shared, make_staging, publish, writing
from distprune.checkpoint.output_lock import locking, remove_files
from distprune.checkpoint.pretrained import load_tokenizer
from distprune.checkpoint.replaceable import Inputs, check_output
from distprune.checkpoint.shared_reading import open_together, sample_together

__all__ = [
    "HfDirectory",
    "Inputs",
    "InspectReport",
    "ModelWriter",
    "TensorReport",
    "check_file",
    "check_output",
    "check_shared",
    "digest_together",
    "file_digest",
    "fill_from_file",
    "import_extra",
    "inspect_directory",
    "load",
    "load_model",
    "load_tokenizer",
    "locking",
    "make_staging",
    "mesh_of",
    "name_of_model",
    "open_directory",
    "open_together",
    "publish",
    "read_weight_file",
    "remove_files",
    "resolve_model",
    "sample_together",
    "save",
    "save_model",
    "small_folders",
    "write_together",
    "writing",
    "writing_file",
]
