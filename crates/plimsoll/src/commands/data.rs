//! `plimsoll data`: shows what a model will see of the training data of a run.

use super::hub::with_hub_files;
use crate::args::DataArgs;
use crate::output;
use plimsoll_core::{Exit, Failure};
use plimsoll_device::private_file;
use plimsoll_train::config::{DataSection, DataSource, EXAMPLE_PREFIX, LongSamples};
use plimsoll_train::data::report::{DataFigures, ReportSettings, SampleDocument, SourceFigures};
use plimsoll_train::data::{
    DataError, DataFiles, Dataset, Place, RecordFormat, Tokenizer, TrainingData, read_begin_token, recognize,
};
use plimsoll_train::planning::prepare::{read_dataset, read_training_data};
use plimsoll_train::resolve::{HubNeed, Model, RunRequest, write_example};
use plimsoll_train::session::length::rows_of_run;
use plimsoll_watch::data_report::{
    DataReport, DataSample, DataWarning, EvaluationData, LengthBucket, LongestDocument, SamplePart, SourceReport,
};
use std::thread::available_parallelism;

/// Prints figures, samples and warnings. If a run would refuse the data, also prints the reason to stderr and returns
/// exit code 2.
///
/// # Errors
/// An invalid run file, model, tokenizer or template, or data that cannot be read.
pub fn run(args: &DataArgs) -> Result<Exit, Failure> {
    let mut request = with_hub_files(args.build_request()?, HubNeed::Data, false)?;
    let names_example = |path: &String| path.starts_with(EXAMPLE_PREFIX);
    let is_example = request.data.training_paths().chain(&request.model.path).any(names_example);
    let folder = is_example.then(private_file::temporary_folder).transpose();
    let folder = folder.map_err(|error| {
        let place = std::env::temp_dir();
        Failure::input(format!("cannot make a folder in {}: {error}", place.display())).hint("set TMPDIR")
    })?;
    if let Some(folder) = &folder {
        request.run.dir = folder.path().to_string_lossy().into_owned();
        write_example(&mut request)?;
    }
    if !request.data.has_training_data() {
        return Err(Failure::input("data.train names no file").hint("name one: --set data.train=train.jsonl"));
    }
    let (report, refusal) = build_report(request, args.samples())?;
    if args.json {
        output::print_json(&report.json());
    } else {
        output::print_styled(&report.text(output::text_style()));
    }
    let Some(refusal) = refusal else { return Ok(Exit::Done) };
    output::print_error(&refusal);
    Ok(Exit::Input)
}

/// Reads the data of a run. Returns the report, and the reason why the run would refuse the data.
///
/// # Errors
/// An invalid model, tokenizer or template, or data that cannot be read.
fn build_report(mut request: RunRequest, samples: usize) -> Result<(DataReport, Option<Failure>), Failure> {
    let mut model = Model::open(&request)?;
    model.stop_at_document_end()?;
    let DataFiles { files, formats } = recognize_sources(&request.data)?;
    let cores = available_parallelism().map_or(1, |cores| cores.get());
    let threads = request.run.threads.requested().map_or(cores, |threads| threads as usize);
    // A run that refuses long documents has a report all the same.
    let long = std::mem::replace(&mut request.data.long, LongSamples::Split);
    output::print_progress("reading and tokenizing the data");
    let mut sources = Vec::new();
    let mut figures = match read_training_data(&request, &model, threads)? {
        Ok(data) => {
            sources = describe_sources(&request, &data);
            // Token ids need no tokenizer; their text is then unknown.
            let tokenizer = model.tokenizer().and_then(|file| Tokenizer::load(&file).ok());
            let settings = ReportSettings {
                samples,
                tokenizer: tokenizer.as_ref(),
                begin_token: model.folder().map(read_begin_token).transpose()?.flatten(),
                end_tokens: &model.config.eos,
                long,
                max_positions: model.config.max_positions,
            };
            DataFigures::read(&data, &settings)?
        }
        Err(DataError::Empty { files, skipped }) => {
            DataFigures::without_labels(formats, skipped, DataError::Empty { files, skipped })
        }
        Err(error) => return Err(error.into()),
    };
    let mut refusal = figures.refusal.take().map(Failure::from);
    refusal = refusal.or_else(|| model.check_sequence_length(&request).err());
    let mut eval = None;
    if !request.data.eval.is_empty() {
        let data = read_dataset(&request, &model, &request.data.eval, threads)??;
        refusal = refusal.or_else(|| data.refuse_long(long).err().map(Failure::from));
        eval = Some(evaluation(&data));
    }
    let mut report = DataReport {
        files: files.iter().map(|file| file.display().to_string()).collect(),
        sequence: u64::from(request.data.sequence),
        pack: request.data.pack,
        eval,
        refusal: refusal.as_ref().map(|failure| failure.message.clone()),
        ..describe(figures)
    };
    for (source, warning) in sources {
        report.sources.push(source);
        report.warnings.extend(warning);
    }
    Ok((report, refusal))
}

/// Lists the files of all sources of training data, with their formats.
///
/// # Errors
/// As [`recognize`].
fn recognize_sources(data: &DataSection) -> Result<DataFiles, DataError> {
    let mut all = DataFiles { files: Vec::new(), formats: Vec::new() };
    for DataSource { path, format, split, .. } in data.training_sources() {
        let found = recognize(&path, format.unwrap_or(data.format), split)?;
        all.files.extend(found.files);
        let new = found.formats.into_iter().filter(|format| !all.formats.contains(format)).collect::<Vec<_>>();
        all.formats.extend(new);
    }
    Ok(all)
}

/// Returns the report of each table `[[data.source]]`, with the warning about it.
fn describe_sources(request: &RunRequest, data: &TrainingData) -> Vec<(SourceReport, Option<DataWarning>)> {
    let figures = SourceFigures::read(data, rows_of_run(request, data.rows()));
    // Hub ids are shown in place of the files that were fetched.
    let named = request.hub.source.as_ref().unwrap_or(&request.data.source);
    let describe = |(index, (source, figures)): (usize, (&DataSource, SourceFigures))| {
        let warning = figures.repetition_warning(&request.data.source_key(index));
        (source_report(source, figures), warning.map(data_warning))
    };
    named.iter().zip(figures).enumerate().map(describe).collect()
}

fn source_report(source: &DataSource, figures: SourceFigures) -> SourceReport {
    SourceReport {
        path: source.path.clone(),
        format: join_names(&figures.formats),
        documents: figures.documents,
        tokens: figures.tokens,
        rows: figures.rows,
        share: figures.share,
        epochs: figures.epochs,
    }
}

fn data_warning(warning: plimsoll_train::data::report::DataWarning) -> DataWarning {
    DataWarning { id: warning.id.to_owned(), text: warning.text }
}

/// Returns the names of formats, joined by ` and `; `None` without a format.
fn join_names(formats: &[RecordFormat]) -> Option<String> {
    let names: Vec<&str> = formats.iter().map(|format| format.name()).collect();
    (!names.is_empty()).then(|| names.join(" and "))
}

/// Returns the size of evaluation data.
fn evaluation(data: &Dataset) -> EvaluationData {
    EvaluationData { documents: data.documents(), tokens: data.tokens(), labelled_tokens: data.labelled_tokens() }
}

/// Returns the report of figures. The keys that come from the run file have their defaults.
fn describe(figures: DataFigures) -> DataReport {
    let longest = figures.longest.map(|longest| LongestDocument {
        tokens: longest.tokens,
        file: longest.location.file.display().to_string(),
        record: record_number(longest.location.place),
        place: longest.location.to_string(),
    });
    let bucket = |bucket: plimsoll_train::data::report::LengthBucket| LengthBucket {
        from_tokens: bucket.from_tokens,
        to_tokens: bucket.to_tokens,
        documents: bucket.documents,
    };
    DataReport {
        format: join_names(&figures.formats),
        documents: figures.documents,
        tokens: figures.tokens,
        labelled_tokens: figures.labelled_tokens,
        longest,
        samples: figures.samples.into_iter().map(sample).collect(),
        warnings: figures.warnings.into_iter().map(data_warning).collect(),
        files: Vec::new(),
        skipped_documents: figures.skipped,
        sequence: 0,
        rows: figures.rows,
        pack: false,
        padding_share: figures.padding_share,
        long_documents: figures.long_documents,
        split_documents: figures.split_documents,
        duplicates: figures.duplicates,
        compared_documents: figures.compared_documents,
        lengths: figures.lengths.into_iter().map(bucket).collect(),
        sources: Vec::new(),
        eval: None,
        refusal: None,
    }
}

/// Returns the number of a line or record; `None` for a whole file.
fn record_number(place: Place) -> Option<u64> {
    match place {
        Place::File => None,
        Place::Line(number) | Place::Record(number) => Some(number),
    }
}

fn sample(document: SampleDocument) -> DataSample {
    let SampleDocument { input_ids, labels, text, parts } = document;
    let part = |part: plimsoll_train::data::report::TextPart| SamplePart {
        text: part.text,
        tokens: part.tokens,
        is_labelled: part.is_labelled,
    };
    DataSample { input_ids, labels, text, parts: parts.into_iter().map(part).collect() }
}
