//! Imports between the modules of a crate, and their cycles.
//!
//! The modules of each folder are compared with their siblings: `a` imports `b` where any file below `a` names a path
//! into `b`, in a `use` or in code. Code under `#[cfg(test)]` does not count. A parent and its children belong
//! together, so arrows between them do not count either.

use super::{Finding, Source};
use anyhow::{Context, bail};
use proc_macro2::{Delimiter, TokenStream, TokenTree};
use quote::ToTokens;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Path of a module from the root of its crate: `["search", "measure"]`.
type ModulePath = Vec<String>;

/// A module of a crate, with the paths that occur in its own code, not in that of its child modules.
struct Module {
    path: ModulePath,
    /// Modules and items of the crate that its code names. Each path is written from the root of the crate.
    names: BTreeSet<ModulePath>,
}

/// Returns the figure that counts the import cycles in the crate `name`, whose sources are in `src`.
///
/// # Errors
/// Fails if a file cannot be read or parsed.
pub fn cycles(name: &'static str, src: &Path) -> anyhow::Result<Finding> {
    let mut modules = Vec::new();
    read_module(&src.join("lib.rs"), src, Vec::new(), &mut modules)?;
    let places = import_cycles(&modules).into_iter().map(|cycle| format!("{name}: {}", cycle.join(" ↔ "))).collect();
    // Cycles that are still to be removed. These numbers only go down; the aim is 0.
    let (name, limit) = match name {
        "plimsoll-plan" => ("import cycles in plimsoll-plan", 0.0),
        "plimsoll-train" => ("import cycles in plimsoll-train", 0.0),
        _ => ("import cycles in plimsoll-device", 0.0),
    };
    Ok(Finding { name, of: 0, places, limit })
}

/// Returns the figure that counts the files beside a `tests/main.rs` that would not run: `main.rs` has no `mod` line for
/// them, and the manifest no `[[test]]`.
pub fn files_of_tests(sources: &[Source]) -> Finding {
    let beside_main: Vec<(&str, bool)> =
        sources.iter().filter_map(|source| Some((source.path.as_str(), is_run(sources, &source.path)?))).collect();
    let places = beside_main.iter().filter(|(_, is_run)| !is_run).map(|(path, _)| (*path).to_owned()).collect();
    Finding { name: "files of tests that no test program has", of: beside_main.len(), places, limit: 0.0 }
}

/// Returns whether a test program has the file at `path`; `None` if it is not in a folder with a `tests/main.rs`.
fn is_run(sources: &[Source], path: &str) -> Option<bool> {
    let text = |path: String| sources.iter().find(|source| source.path == path).map(|source| source.text.as_str());
    let (folder, name) = path.rsplit_once("/tests/")?;
    let stem = name.strip_suffix(".rs").filter(|stem| !stem.contains('/'))?;
    let main = text(format!("{folder}/tests/main.rs"))?;
    let is_program = text(format!("{folder}/Cargo.toml"))?.contains(&format!("[[test]]\nname = \"{stem}\"\n"));
    Some(stem == "main" || is_program || main.contains(&format!("\nmod {stem};\n")))
}

/// Reads the module in `file` and all modules below it, and adds them to `modules`. The files of its child modules lie
/// in `folder`.
fn read_module(file: &Path, folder: &Path, path: ModulePath, modules: &mut Vec<Module>) -> anyhow::Result<()> {
    let text = std::fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
    let parsed = syn::parse_file(&text).with_context(|| format!("cannot parse {}", file.display()))?;
    read_items(&parsed.items, folder, path, modules)
}

fn read_items(items: &[syn::Item], folder: &Path, path: ModulePath, modules: &mut Vec<Module>) -> anyhow::Result<()> {
    let mut names = BTreeSet::new();
    for item in items.iter().filter(|item| !is_test(item)) {
        let syn::Item::Mod(module) = item else {
            let item = without_tests(item);
            collect_paths(item, &path, &mut names);
            continue;
        };
        let name = module.ident.to_string();
        let child = [path.clone(), vec![name.clone()]].concat();
        match &module.content {
            Some((_, items)) => read_items(items, &folder.join(&name), child, modules)?,
            None => {
                let (file, folder) = module_file(folder, &name)?;
                read_module(&file, &folder, child, modules)?;
            }
        }
    }
    modules.push(Module { path, names });
    Ok(())
}

/// Returns the file of the child module `name`, and the folder for the files of its own children. `folder` is that of
/// the parent.
fn module_file(folder: &Path, name: &str) -> anyhow::Result<(PathBuf, PathBuf)> {
    let inside = folder.join(name);
    for file in [folder.join(format!("{name}.rs")), inside.join("mod.rs")] {
        if file.exists() {
            return Ok((file, inside));
        }
    }
    bail!("module {name} has no file in {}", folder.display())
}

/// Returns whether an item is compiled for tests only (`#[cfg(test)]`).
fn is_test(item: &syn::Item) -> bool {
    let attributes = match item {
        syn::Item::Mod(item) => &item.attrs,
        syn::Item::Fn(item) => &item.attrs,
        syn::Item::Impl(item) => &item.attrs,
        syn::Item::Use(item) => &item.attrs,
        syn::Item::Struct(item) => &item.attrs,
        _ => return false,
    };
    attributes.iter().any(is_test_attribute)
}

/// Returns whether an attribute is `#[cfg(test)]`.
pub fn is_test_attribute(attribute: &syn::Attribute) -> bool {
    let text = attribute.to_token_stream().to_string();
    attribute.path().is_ident("cfg") && text.contains("test") && !text.contains("not")
}

/// Returns the tokens of an item. Leaves out functions of an `impl` block that are compiled for tests only.
fn without_tests(item: &syn::Item) -> TokenStream {
    let mut item = item.clone();
    if let syn::Item::Impl(block) = &mut item {
        block.items.retain(|item| !matches!(item, syn::ImplItem::Fn(f) if f.attrs.iter().any(is_test_attribute)));
    }
    item.to_token_stream()
}

/// Adds the paths in `tokens` that begin with `crate`, `super` or `self` to `names`, each from the root of the crate.
/// `module` is the path of the module that contains the tokens.
fn collect_paths(tokens: TokenStream, module: &[String], names: &mut BTreeSet<ModulePath>) {
    let tokens: Vec<TokenTree> = tokens.into_iter().collect();
    let mut at = 0;
    while at < tokens.len() {
        match &tokens[at] {
            TokenTree::Ident(first) if ["crate", "super", "self"].iter().any(|word| first == word) => {
                at = follow_path(&tokens, at, module, names);
            }
            TokenTree::Group(group) => {
                collect_paths(group.stream(), module, names);
                at += 1;
            }
            _ => at += 1,
        }
    }
}

/// Adds the path whose first segment is the token at `at` to `names`. Returns the position of the first token after the
/// path.
fn follow_path(tokens: &[TokenTree], at: usize, module: &[String], names: &mut BTreeSet<ModulePath>) -> usize {
    let TokenTree::Ident(first) = &tokens[at] else { return at + 1 };
    let prefix = match first.to_string().as_str() {
        "crate" => Some(Vec::new()),
        "super" => module.split_last().map(|(_, parent)| parent.to_vec()),
        _ => Some(module.to_vec()),
    };
    let Some(prefix) = prefix else { return at + 1 };
    follow_segments(tokens, at + 1, prefix, names)
}

/// Adds the path, or paths, that continue `prefix` from the token at `at` by `:: segment` and `:: { … }` to `names`.
/// Returns the position of the first token after them.
fn follow_segments(
    tokens: &[TokenTree],
    mut at: usize,
    mut prefix: ModulePath,
    names: &mut BTreeSet<ModulePath>,
) -> usize {
    while is_double_colon(tokens, at) {
        match tokens.get(at + 2) {
            Some(TokenTree::Ident(segment)) if segment == "super" => {
                prefix.pop();
            }
            Some(TokenTree::Ident(segment)) if segment == "self" => {}
            Some(TokenTree::Ident(segment)) => prefix.push(segment.to_string()),
            Some(TokenTree::Group(group)) if group.delimiter() == Delimiter::Brace => {
                let inner: Vec<TokenTree> = group.stream().into_iter().collect();
                let mut entry = 0;
                while entry < inner.len() {
                    entry = match &inner[entry] {
                        TokenTree::Ident(segment) => {
                            let mut path = prefix.clone();
                            if segment != "self" {
                                path.push(segment.to_string());
                            }
                            follow_segments(&inner, entry + 1, path, names)
                        }
                        _ => entry + 1,
                    };
                }
                return at + 3;
            }
            _ => break,
        }
        at += 3;
    }
    if !prefix.is_empty() {
        names.insert(prefix);
    }
    at
}

fn is_double_colon(tokens: &[TokenTree], at: usize) -> bool {
    let is_colon = |at: usize| matches!(tokens.get(at), Some(TokenTree::Punct(punct)) if punct.as_char() == ':');
    is_colon(at) && is_colon(at + 1)
}

/// Returns the sets of sibling modules that import each other in a cycle. Each set is a sorted list of module paths.
fn import_cycles(modules: &[Module]) -> Vec<Vec<String>> {
    let paths: BTreeSet<&[String]> = modules.iter().map(|module| module.path.as_slice()).collect();
    let mut arrows: BTreeMap<(ModulePath, String), BTreeSet<String>> = BTreeMap::new();
    for module in modules {
        for name in &module.names {
            // The siblings are where both paths part.
            let shared = module.path.iter().zip(name).take_while(|(a, b)| a == b).count();
            let (Some(from), Some(to)) = (module.path.get(shared), name.get(shared)) else { continue };
            let folder = &module.path[..shared];
            if paths.contains([folder, std::slice::from_ref(to)].concat().as_slice()) {
                arrows.entry((folder.to_vec(), from.clone())).or_default().insert(to.clone());
            }
        }
    }
    let folders: BTreeSet<ModulePath> = arrows.keys().map(|(folder, _)| folder.clone()).collect();
    folders.iter().flat_map(|folder| rings_of_folder(folder, &arrows)).collect()
}

/// Returns the sets of two or more modules in one folder that all reach each other by imports. `arrows` leads from
/// folder and module to the siblings that the module imports.
fn rings_of_folder(folder: &[String], arrows: &BTreeMap<(ModulePath, String), BTreeSet<String>>) -> Vec<Vec<String>> {
    let siblings: BTreeSet<&String> = arrows.keys().filter(|(of, _)| of == folder).map(|(_, name)| name).collect();
    let reached: BTreeMap<&String, BTreeSet<String>> =
        siblings.iter().map(|name| (*name, reachable(name, folder, arrows))).collect();
    let mut cycles: BTreeSet<Vec<String>> = BTreeSet::new();
    for name in &siblings {
        if reached[name].contains(*name) {
            let both =
                siblings.iter().filter(|other| reached[name].contains(**other) && reached[*other].contains(*name));
            let full = |module: &String| [folder, std::slice::from_ref(module)].concat().join("::");
            let cycle: Vec<String> = both.map(|module| full(module)).collect();
            if cycle.len() > 1 {
                cycles.insert(cycle);
            }
        }
    }
    cycles.into_iter().collect()
}

/// Returns the modules of a folder that the module `from` imports, directly or through others.
fn reachable(
    from: &str,
    folder: &[String],
    arrows: &BTreeMap<(ModulePath, String), BTreeSet<String>>,
) -> BTreeSet<String> {
    let (mut seen, mut open) = (BTreeSet::new(), vec![from.to_owned()]);
    while let Some(module) = open.pop() {
        for next in arrows.get(&(folder.to_vec(), module)).into_iter().flatten() {
            if seen.insert(next.clone()) {
                open.push(next.clone());
            }
        }
    }
    seen
}

#[cfg(test)]
mod tests {
    use super::*;

    fn module(path: &[&str], code: &str) -> Module {
        let path: ModulePath = path.iter().map(|part| (*part).to_owned()).collect();
        let mut names = BTreeSet::new();
        collect_paths(code.parse().unwrap(), &path, &mut names);
        Module { path, names }
    }

    #[test]
    fn ring_through_nested_use_and_code_is_found() {
        let modules = [
            module(&[], "use crate::a::X;"),
            module(&["a"], "use crate::{b::{self, Y}, std};"),
            module(&["a", "inner"], "use super::X;"),
            module(&["b"], "fn f() { crate::c::g() }"),
            module(&["c"], "fn g() { super::a::inner::h(vec![1]) }"),
            module(&["d"], "use super::a;"),
        ];
        assert_eq!(import_cycles(&modules), [["a", "b", "c"]]);
    }

    #[test]
    fn file_of_tests_without_program_is_found() {
        let file = |path: &str, text: &str| Source { path: path.to_owned(), text: text.to_owned() };
        let sources = [
            file("a/Cargo.toml", "[[test]]\nname = \"alone\"\n"),
            file("a/tests/main.rs", "//! Tests.\n\nmod known;\n"),
            file("a/tests/known.rs", ""),
            file("a/tests/alone.rs", ""),
            file("a/tests/unknown.rs", ""),
            file("a/tests/known/part.rs", ""),
            file("b/tests/any.rs", ""),
        ];
        assert_eq!(files_of_tests(&sources).places, ["a/tests/unknown.rs"]);
        let project = crate::style::sources(&crate::style::root()).unwrap();
        assert!(files_of_tests(&project).of > 40);
    }

    #[test]
    fn ring_within_folder_is_named_by_path() {
        let modules =
            [module(&["a"], ""), module(&["a", "x"], "use super::y::Y;"), module(&["a", "y"], "use crate::a::x;")];
        assert_eq!(import_cycles(&modules), [["a::x", "a::y"]]);
    }

    #[test]
    fn parent_and_child_are_no_ring() {
        let modules = [module(&["a"], "use self::x::X;"), module(&["a", "x"], "use super::Y;")];
        assert!(import_cycles(&modules).is_empty());
    }
}
