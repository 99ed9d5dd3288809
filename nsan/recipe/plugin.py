"""What the four recipes have in common: mixed into the framework's base class by the module of each."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import nsan
from nsan.errors import NsanError
from nsan.recipe.arguments import ALWAYS, add_options, filters_in_words, filters_of, inputs_of
from nsan.recipe.jobs import Mapper, jobs_of
from nsan.recipe.output import check_output
from nsan.recipe.plan import ABOUT
from nsan.text import safe

if TYPE_CHECKING:
    from collections.abc import Mapping

    import polars as pl
    from nsys_recipe.lib.recipe import Recipe as _Vendor

    from nsan.fleet.member import Failure
    from nsan.recipe.plan import Plan, Reduced
else:
    _Vendor = object


class UmRecipe(_Vendor):
    """A recipe of nsan. The framework's base class stands behind it in the order of classes."""

    plan: ClassVar[Plan]

    @classmethod
    def get_argument_parser(cls) -> Any:
        """Declare the options."""
        from nsys_recipe.lib.args import Option

        parser = super().get_argument_parser()
        add_options(parser, Option, (*ALWAYS, *cls.plan.options))
        for flag, settings in cls.plan.own:
            parser.add_recipe_argument(flag, **settings)
        return parser

    def run(self, context: Any) -> None:
        """Read the reports, put them together, and write what was found."""
        super().run(context)
        args = self._parsed_args
        try:
            filters = filters_of(args)
            jobs = jobs_of(inputs_of(args), filters)
            check_output(args)
            mapper = Mapper(context)
            found = _working(lambda: self.plan.reduce(mapper, jobs, args))
        except NsanError as error:
            _stop(str(error), 1)
        for failure in mapper.failures:
            _tell(f"{failure.source} could not be read: {failure.reason}")
        if not found.n_reports:
            which = "the report" if len(jobs) == 1 else f"none of the {len(jobs)} reports"
            _stop(f"{which} could {'not ' * (len(jobs) == 1)}be read: nothing is written.", 1)
        for note in found.notes:
            _tell(note)
        if found.nothing:
            _tell(found.nothing)
            _no_data()
        try:
            self._write(found, mapper.failures, filters_in_words(filters))
        except OSError as error:
            _stop(f"the results cannot be written: {error.strerror or error}.", 1)

    def _write(self, found: Reduced, failures: list[Failure], part: str) -> None:
        for name, table in found.tables.items():
            written = _plain(table)
            written.write_parquet(self.add_output_file(f"{name}.parquet"))
            if getattr(self._parsed_args, "csv", False):
                text = _csv(table, self.plan.tables[name])
                Path(self.add_output_file(f"{name}.csv")).write_text(text, "utf-8", newline="")
        about = {
            "schema": 1,
            "recipe": self.plan.name,
            "nsan": nsan.__version__,
            "n_reports": found.n_reports,
            "part": part,
            "is_modelled": found.is_modelled,
            "notes": list(found.notes),
            "failures": [vars(each) for each in failures],
            "tables": list(found.tables),
        }
        Path(self.add_output_file(ABOUT)).write_text(json.dumps(about, indent=2) + "\n", "utf-8")
        self.create_notebook(f"{self.plan.name}.ipynb")
        self._analysis_dict.setdefault("InputFiles", inputs_of(self._parsed_args))
        # As the framework's own recipes write it: local time without a zone.
        ended = str(datetime.now())  # noqa: DTZ005
        self._analysis_dict.update({"EndTime": ended, "Outputs": self._output_files})
        self.create_analysis_file()


def _working(work: Callable[[], Reduced]) -> Reduced:
    """Work, and say what is wrong where the processes that should have helped cannot."""
    try:
        return work()
    except ImportError as error:
        _stop(
            f"a worker cannot import what it needs ({error}). Install nsan, in this version, where the workers run.",
            1,
        )
    except Exception as error:
        if type(error).__name__ not in {"BrokenProcessPool", "KilledWorker"}:
            raise
        _stop(
            f"a worker process was ended ({type(error).__name__}), perhaps for want of memory. Use fewer: "
            "`--mode none`, or set NSYS_CONCURRENT_MAX_WORKERS or NSYS_DASK_N_WORKERS.",
            1,
        )


def _plain(table: pl.DataFrame) -> pl.DataFrame:
    """Turn types of polars alone into text, for whoever reads the file with something else."""
    import polars as pl

    return table.with_columns(
        pl.col(name).cast(pl.String)
        for name, dtype in table.schema.items()
        if isinstance(dtype, pl.Enum | pl.Categorical)
    )


def _csv(table: pl.DataFrame, result: Any) -> str:
    from nsan.tabular.text import csv_text
    from nsan.units import format_address

    addresses = {c.name for c in result.columns if c.unit == "byte address"} & set(table.columns)
    rows: list[Mapping[str, Any]] = [
        row | {name: format_address(row[name]) for name in addresses} for row in table.to_dicts()
    ]
    return csv_text(rows, table.columns)


def _tell(message: str, level: int = logging.WARNING) -> None:
    """Write a message where the framework writes its own: nsys shows nothing else of a recipe that ends well."""
    lines = [f"nsan: {safe(line)}" for line in message.split("\n")]
    logger = logging.getLogger("nsys_recipe")
    if logger.hasHandlers():
        for line in lines:
            logger.log(level, "%s", line)
    else:
        sys.stderr.write("".join(f"{line}\n" for line in lines))


def _stop(message: str, status: int) -> NoReturn:
    _tell(message, logging.ERROR)
    # The framework takes away what was written on the way out.
    sys.exit(status)


def _no_data() -> NoReturn:
    """End as the framework does where there is no data: no output, and status 0."""
    from nsys_recipe.lib import exceptions

    error = getattr(exceptions, "NoDataError", None)
    if error is None:
        sys.exit(0)
    raise error
