//! Rendering with minijinja, changed where Jinja2 and Python differ from it.
//!
//! A template is compiled to minijinja's instructions, which are then rewritten:
//!
//! - Operators become calls of [`super::operators`], which follow Python and charge their results.
//! - Raw text is written through the formatter, as values are, so that it is charged, too.
//! - After each call, filter, list and map stands a filter that charges its result ([`super::meter`]).

use super::clock::format_moment;
use super::failure::{Outcome, fail};
use super::filters::{CHARGE_FILTER, register_filters, register_tests};
use super::meter;
use super::methods;
use super::operators;
use super::python_text::python_str;
use minijinja::machinery::{
    CompiledTemplate, Instruction, Instructions, TemplateConfig, Vm, WhitespaceConfig, make_string_output,
};
use minijinja::{AutoEscape, Environment, Error, Output, State, UndefinedBehavior, Value};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Instructions of a rendering, beside those for each byte of its input.
const FUEL: u64 = 4_000_000;
const FUEL_PER_BYTE: u64 = 8;
/// Bytes of texts and lists of a rendering, beside those for each byte of its input.
const BYTES: usize = 64 << 20;
const BYTES_PER_BYTE: usize = 64;
/// Frames on the stack of a rendering; a call of a macro counts as 4.
const RECURSION_MAX: usize = 200;
/// Stands for the place of an argument or a local that minijinja does not remember.
const NO_LOCAL: u8 = u8::MAX;

/// The environment in which templates run: filters, tests and functions.
pub(super) struct Engine {
    environment: Environment<'static>,
}

/// A compiled template.
pub(super) struct Program<'a> {
    environment: Environment<'a>,
    instructions: Instructions<'a>,
    blocks: BTreeMap<&'a str, Instructions<'a>>,
}

impl Engine {
    /// Creates the environment. `now` is the moment of `strftime_now`, in seconds from the beginning of 1970.
    pub fn new(now: i64) -> Engine {
        let mut environment = Environment::new();
        environment.set_undefined_behavior(UndefinedBehavior::Lenient);
        environment.set_recursion_limit(RECURSION_MAX);
        environment.set_formatter(write_value);
        environment.set_unknown_method_callback(methods::call);
        environment.remove_global("debug");
        environment
            .add_function("raise_exception", |message: &Value| -> Outcome<()> { Err(fail(python_str(message)?)) });
        environment.add_function("strftime_now", move |format: &str| format_moment(now, format));
        register_filters(&mut environment);
        register_tests(&mut environment);
        operators::register(&mut environment);
        Engine { environment }
    }

    /// Compiles a template, as [`super::tags::prepare`] returns it.
    pub fn compile<'a>(&self, name: &'a str, source: &'a str) -> Outcome<Program<'a>> {
        let config = TemplateConfig {
            syntax_config: Default::default(),
            ws_config: WhitespaceConfig { keep_trailing_newline: false, lstrip_blocks: true, trim_blocks: true },
            default_auto_escape: Arc::new(|_: &str| AutoEscape::None),
        };
        let compiled = CompiledTemplate::new(name, source, &config)?;
        let blocks = compiled.blocks.iter().map(|(name, instructions)| (*name, rewrite(instructions))).collect();
        let instructions = rewrite(&compiled.instructions);
        Ok(Program { environment: self.environment.clone(), instructions, blocks })
    }
}

impl Program<'_> {
    /// Renders the template with its variables. `input_bytes` is the size of the conversation, to which the limits
    /// grow. `generation` blocks are marked if `marking`.
    pub fn render(&mut self, variables: &Value, input_bytes: usize, marking: bool) -> Outcome<String> {
        meter::begin(BYTES.saturating_add(BYTES_PER_BYTE.saturating_mul(input_bytes)), marking);
        self.environment.set_fuel(Some(FUEL + FUEL_PER_BYTE * input_bytes as u64));
        let mut text = String::new();
        let machine = Vm::new(&self.environment);
        let mut output = make_string_output(&mut text);
        machine.eval(&self.instructions, variables.clone(), &self.blocks, &mut output, AutoEscape::None)?;
        drop(output);
        Ok(text)
    }
}

/// Writes a value as Python prints it.
fn write_value(out: &mut Output, _: &State, value: &Value) -> Result<(), Error> {
    let owned;
    let text = match value.as_str() {
        Some(text) => text,
        None => {
            owned = python_str(value)?;
            &owned
        }
    };
    meter::charge_bytes(text.len())?;
    out.write_str(text).map_err(|_| fail("the text cannot be written"))
}

/// Returns the instructions with the changes that the module describes. Jumps lead to the same instructions as before.
fn rewrite<'a>(instructions: &Instructions<'a>) -> Instructions<'a> {
    let count = instructions.len() as u32;
    let mut original: Vec<Instruction<'a>> = (0..count).filter_map(|at| instructions.get(at).cloned()).collect();
    // minijinja reads `-a.b` as `(-a).b`.
    for at in 1..original.len() {
        if matches!((&original[at - 1], &original[at]), (Instruction::Neg, Instruction::GetAttr(_))) {
            original.swap(at - 1, at);
        }
    }
    let replaced: Vec<Vec<Instruction<'a>>> = original.iter().map(replace).collect();
    let mut starts = Vec::with_capacity(replaced.len() + 1);
    let mut next = 0;
    for group in &replaced {
        starts.push(next);
        next += group.len() as u32;
    }
    starts.push(next);
    let mut rewritten = Instructions::new(instructions.name(), instructions.source());
    for (at, group) in (0u32..).zip(replaced) {
        for instruction in group {
            let instruction = redirect(instruction, &starts);
            match (instructions.get_span(at), instructions.get_line(at)) {
                (Some(span), _) => rewritten.add_with_span(instruction, span),
                (None, Some(line)) => rewritten.add_with_line(instruction, line as u16),
                (None, None) => rewritten.add(instruction),
            };
        }
    }
    rewritten
}

/// Returns the instructions that stand for one of minijinja's.
fn replace<'a>(instruction: &Instruction<'a>) -> Vec<Instruction<'a>> {
    let call = |name: &'static str, count: u16| Instruction::CallFunction(name, Some(count));
    let charge = || Instruction::ApplyFilter(CHARGE_FILTER, Some(1), NO_LOCAL);
    match instruction {
        Instruction::EmitRaw(text) => vec![Instruction::LoadConst(Value::from(*text)), Instruction::Emit],
        Instruction::Add => vec![call("+", 2)],
        Instruction::Neg => vec![call("-", 1)],
        Instruction::Mul => vec![call("*", 2)],
        Instruction::Rem => vec![call("%", 2)],
        Instruction::StringConcat => vec![call("~", 2)],
        Instruction::Slice => vec![call("[:]", 4)],
        Instruction::GetItem => vec![call("[]", 2)],
        Instruction::Eq => vec![call("==", 2)],
        Instruction::Ne => vec![call("!=", 2)],
        Instruction::Lt => vec![call("<", 2)],
        Instruction::Lte => vec![call("<=", 2)],
        Instruction::Gt => vec![call(">", 2)],
        Instruction::Gte => vec![call(">=", 2)],
        Instruction::In => vec![call("in", 2)],
        Instruction::PushLoop(_) => vec![call("for", 1), instruction.clone()],
        Instruction::ApplyFilter(..)
        | Instruction::CallFunction(..)
        | Instruction::CallMethod(..)
        | Instruction::CallObject(..)
        | Instruction::EndCapture
        | Instruction::BuildList(..)
        | Instruction::BuildMap(..) => vec![instruction.clone(), charge()],
        _ => vec![instruction.clone()],
    }
}

/// Returns a jump with its target at the new place.
fn redirect<'a>(instruction: Instruction<'a>, starts: &[u32]) -> Instruction<'a> {
    let moved = |target: u32| starts.get(target as usize).copied().unwrap_or(target);
    match instruction {
        Instruction::Iterate(target) => Instruction::Iterate(moved(target)),
        Instruction::Jump(target) => Instruction::Jump(moved(target)),
        Instruction::JumpIfFalse(target) => Instruction::JumpIfFalse(moved(target)),
        Instruction::JumpIfFalseOrPop(target) => Instruction::JumpIfFalseOrPop(moved(target)),
        Instruction::JumpIfTrueOrPop(target) => Instruction::JumpIfTrueOrPop(moved(target)),
        Instruction::BuildMacro(name, target, flags) => Instruction::BuildMacro(name, moved(target), flags),
        other => other,
    }
}
