//! The parser of device lists.

use super::{CardFigures, DeviceAttributes, DeviceRequest, DevicesRequest, LinkRequest, MAX_DEVICES, RequestError};
use crate::paper;
use plimsoll_core::Budget;
use std::collections::BTreeMap;
use std::str::FromStr;

/// Slowest pace of a virtual device in CPU cores. A slower device would not finish a step in reasonable time.
const MIN_PACE: f64 = 0.01;

/// Longest name of a device in bytes, with its host (at most 64 in Linux) and its attributes before `=`.
const MAX_NAME_BYTES: usize = 160;

impl FromStr for DevicesRequest {
    type Err = RequestError;

    fn from_str(text: &str) -> Result<DevicesRequest, RequestError> {
        let words: Vec<String> = text.split(',').map(lower_case_words).collect();
        let text = words.join(",");
        let mut list = ListParser { text: &text, ..ListParser::default() };
        text.split(',').map(str::trim).try_for_each(|part| list.add(part))?;
        list.finish()
    }
}

/// Returns a part of a list with its words in lower case: the kind of a device, and `ray`. Names of hosts and of users
/// stay.
fn lower_case_words(part: &str) -> String {
    const WORDS: [&str; 6] = ["auto", "cpu", "cuda", "file", "host", "ray"];
    let (head, value) = part.split_at(part.find(['=', '@']).unwrap_or(part.len()));
    let mut text = String::new();
    for segment in head.split_inclusive(['/', ':']) {
        let lower = segment.to_ascii_lowercase();
        let is_word = segment.ends_with(':') || (!text.ends_with(':') && WORDS.contains(&lower.trim()));
        text += if is_word { &lower } else { segment };
    }
    text + value
}

/// A device list while it is parsed.
#[derive(Default)]
struct ListParser<'t> {
    /// The whole list.
    text: &'t str,
    request: DevicesRequest,
    /// Whether the list has the word `auto`.
    auto: bool,
    /// The device of the last part, and how often the part names it. Figures that follow belong to it.
    last: Option<(usize, DeviceRequest)>,
    /// Parts that may be links between machines, with their values. The machines are known at the end.
    links: Vec<(&'t str, Option<&'t str>)>,
    /// The names of machines on paper in lower case, each with its first spelling in the list.
    machines: BTreeMap<String, String>,
}

impl<'t> ListParser<'t> {
    /// Adds a part of the list.
    fn add(&mut self, part: &'t str) -> Result<(), RequestError> {
        let (name, value) = match part.split_once('=') {
            Some((name, value)) => (name.trim(), Some(value.trim())),
            None => (part, None),
        };
        let word = name.to_ascii_lowercase();
        if CardFigures::KEYS.contains(&&*word) {
            return self.set_figure(&word, value.unwrap_or_default(), part);
        }
        self.add_last()?;
        let duplicate = || RequestError::Duplicate { device: name.to_owned() };
        let budget = || {
            let value = value.ok_or_else(|| RequestError::MissingBudget { device: name.to_owned() })?;
            parse_budget(name, value)
        };
        match &*word {
            "" => return Err(RequestError::MissingDevice { text: self.text.to_owned() }),
            "auto" if self.auto => return Err(duplicate()),
            "auto" if value.is_none() => self.auto = true,
            "host" if self.request.host.is_some() => return Err(duplicate()),
            "host" => self.request.host = Some(budget()?),
            "file" if self.request.file.is_some() => return Err(duplicate()),
            "file" => self.request.file = Some(budget()?),
            _ => match name.strip_suffix("/host") {
                Some(machine) => {
                    let machine = self.first_spelling(machine);
                    if self.request.machine_hosts.insert(machine, budget()?).is_some() {
                        return Err(duplicate());
                    }
                }
                None => self.add_device(part, name, value)?,
            },
        }
        Ok(())
    }

    /// Returns the name of a machine on paper as the list spells it first. Names are equal in upper and lower case.
    fn first_spelling(&mut self, machine: &str) -> String {
        self.machines.entry(machine.to_ascii_lowercase()).or_insert_with(|| machine.to_owned()).clone()
    }

    /// Adds the device that `part` names, or remembers the part as a link between machines.
    fn add_device(&mut self, part: &'t str, name: &'t str, value: Option<&'t str>) -> Result<(), RequestError> {
        let parsed = match part.strip_prefix("ray:") {
            Some(word) => parse_cluster_device(word).map(|_| (1, DeviceRequest::Ray { word: part.to_owned() })),
            None if part == "ray" => Ok((1, DeviceRequest::Ray { word: part.to_owned() })),
            None => parse_devices(name, value),
        };
        let (number, mut device) = match parsed {
            Err(RequestError::UnknownDevice { .. }) if name.contains('-') && !name.contains(['/', '@']) => {
                self.links.push((name, value));
                return Ok(());
            }
            parsed => parsed?,
        };
        if let DeviceRequest::Remote { host, device, .. } = &mut device
            && device.is_paper()
        {
            *host = self.first_spelling(host);
        }
        self.last = Some((number, device));
        Ok(())
    }

    /// Sets a figure of the card that the last part names.
    fn set_figure(&mut self, key: &str, value: &str, part: &str) -> Result<(), RequestError> {
        let invalid = || RequestError::InvalidFigure { figure: part.to_owned() };
        match self.last.as_mut().map(|(_, device)| device.local_device_mut()) {
            Some(DeviceRequest::Paper { name, figures: Some(figures), .. }) if figures.has(key) => {
                Err(RequestError::RepeatedFigure { card: name.clone(), figure: key.to_owned() })
            }
            Some(DeviceRequest::Paper { figures: Some(figures), .. }) => figures.set(key, value).ok_or_else(invalid),
            _ => Err(invalid()),
        }
    }

    /// Adds the device of the last part to the request, if there is one.
    fn add_last(&mut self) -> Result<(), RequestError> {
        let Some((number, device)) = self.last.take() else { return Ok(()) };
        if let Some(figure) = device.figures().and_then(|figures| figures.missing()) {
            return Err(RequestError::MissingFigure { card: device.name(), figure });
        }
        let devices = &mut self.request.devices;
        let count = devices.len().saturating_add(number);
        if count > MAX_DEVICES {
            return Err(RequestError::TooManyDevices { count, max: MAX_DEVICES });
        }
        // A paper device that is named several times stands for several devices.
        let is_duplicate = || devices.iter().any(|other| other.identity() == device.identity());
        if !device.is_paper() && is_duplicate() {
            let name = device.name();
            let name = name.split('=').next().unwrap_or(&name).trim_end();
            return Err(RequestError::Duplicate { device: name.to_owned() });
        }
        devices.extend(std::iter::repeat_n(device, number));
        Ok(())
    }

    /// Returns the request after the last part.
    fn finish(mut self) -> Result<DevicesRequest, RequestError> {
        self.add_last()?;
        let devices = &self.request.devices;
        if self.auto && !devices.is_empty() {
            return Err(RequestError::AutoAndOthers);
        }
        if !self.auto && devices.is_empty() && self.links.is_empty() {
            return Err(RequestError::MissingDevice { text: self.text.to_owned() });
        }
        self.add_links()?;
        let devices = &self.request.devices;
        match devices.iter().find(|device| device.is_paper()) {
            Some(paper) if devices.iter().any(|device| !device.is_paper()) => {
                return Err(RequestError::PaperAndReal { paper: paper.name() });
            }
            Some(_) => check_paper_memory(&self.request)?,
            None => {}
        }
        let machines = self.request.paper_machines();
        let mut hosts = self.request.machine_hosts.keys();
        match hosts.find(|machine| !machines.contains(machine.as_str())) {
            Some(machine) => Err(self.unknown_machine(&format!("{machine}/host"), machine)),
            None => Ok(self.request),
        }
    }

    /// Adds the links between the machines of the request.
    fn add_links(&mut self) -> Result<(), RequestError> {
        for (name, value) in std::mem::take(&mut self.links) {
            let pair = self.linked_machines(name)?;
            let rate = value.ok_or_else(|| RequestError::MissingLinkRate { part: name.to_owned() })?;
            if self.request.machine_links.insert(pair, parse_link(name, rate)?).is_some() {
                return Err(RequestError::Duplicate { device: name.to_owned() });
            }
        }
        Ok(())
    }

    /// Returns the two machines that the name of a link joins, in the order of their names.
    fn linked_machines(&self, name: &str) -> Result<(String, String), RequestError> {
        let machines = self.request.paper_machines();
        let spelling = |machine: &str| self.machines.get(&machine.to_ascii_lowercase());
        let known = |machine: &str| spelling(machine).filter(|name| machines.contains(name.as_str()));
        let mut error = None;
        // The name of a machine may have hyphens, too.
        for (one, other) in name.match_indices('-').map(|(at, _)| (&name[..at], &name[at + 1..])) {
            match (known(one), known(other)) {
                (Some(one), Some(other)) if one != other => {
                    return Ok((one.min(other).clone(), one.max(other).clone()));
                }
                (Some(_), Some(_)) => error = Some(RequestError::LinkWithinMachine { part: name.to_owned() }),
                (Some(_), None) => error = error.or_else(|| Some(self.unknown_machine(name, other))),
                (None, Some(_)) => error = error.or_else(|| Some(self.unknown_machine(name, one))),
                (None, None) => {}
            }
        }
        Err(error.unwrap_or_else(|| RequestError::UnknownDevice { name: name.to_owned() }))
    }

    /// Returns the error about a machine that no paper device of the list is in. `part` is the part that names it.
    fn unknown_machine(&self, part: &str, machine: &str) -> RequestError {
        let known = self.request.paper_machines().into_iter().map(str::to_owned).collect();
        RequestError::UnknownMachine { part: part.to_owned(), machine: machine.to_owned(), known }
    }
}

/// Checks the memories of a list of paper devices: all are amounts, and each host belongs to one machine.
fn check_paper_memory(request: &DevicesRequest) -> Result<(), RequestError> {
    let DevicesRequest { devices, host, file, machine_hosts, .. } = request;
    let is_share = |budget: Option<Budget>| budget.is_some_and(|budget| budget.amount().is_none());
    let card = devices.iter().find(|device| device.figures().is_some() && is_share(device.budget()));
    let machine =
        machine_hosts.iter().find(|(_, host)| is_share(Some(**host))).map(|(machine, _)| format!("{machine}/host"));
    let of_list = [("host", host), ("file", file)].into_iter().find(|(_, budget)| is_share(**budget));
    let share = card.map(DeviceRequest::name).or(machine).or(of_list.map(|(name, _)| name.to_owned()));
    if let Some(name) = share {
        return Err(RequestError::ShareOnPaper { name });
    }
    let mut on_host = devices.iter().filter(|device| device.machine().is_none());
    let has_network = |device: &&DeviceRequest| device.team_link().is_some_and(LinkRequest::is_network);
    match (host, devices.first().and_then(DeviceRequest::machine)) {
        (Some(_), Some(machine)) if on_host.clone().next().is_none() => {
            Err(RequestError::HostWithoutMachine { machine: machine.to_owned() })
        }
        (Some(_), _) if on_host.clone().count() > 1 => match on_host.find(has_network) {
            Some(device) => Err(RequestError::SharedHost { device: device.name() }),
            None => Ok(()),
        },
        _ => Ok(()),
    }
}

/// Parses a device, and how often the text names it: 8 times for `8xrtx5090` and `pc1/8xrtx5090`. Only paper devices
/// may be named several times.
fn parse_devices(name: &str, value: Option<&str>) -> Result<(usize, DeviceRequest), RequestError> {
    let (machine, own_name) = split_machine(name).map_or(("", name), |(machine, own)| (&name[..=machine.len()], own));
    let counted =
        own_name.split_once(['x', 'X']).and_then(|(count, rest)| Some((count.parse().ok()?, rest.trim_start())));
    match counted {
        Some((number @ 1.., rest)) => {
            let device = parse_device(&format!("{machine}{rest}"), value)?;
            let unknown = RequestError::UnknownDevice { name: name.to_owned() };
            if device.is_paper() { Ok((number, device)) } else { Err(unknown) }
        }
        _ => Ok((1, parse_device(name, value)?)),
    }
}

/// Splits a name into its machine and the device's own name; `None` for a device without a machine.
fn split_machine(name: &str) -> Option<(&str, &str)> {
    // A bandwidth after `@` contains a slash too.
    name.split_once('/').filter(|(machine, _)| !machine.contains('@'))
}

/// Parses the budget in `text`. `device` is the name of the device, for the error.
fn parse_budget(device: &str, text: &str) -> Result<Budget, RequestError> {
    text.parse().map_err(|source| RequestError::InvalidBudget { device: device.to_owned(), source })
}

/// Parses the text after `ray:`. It has the form of a [remote device](DeviceRequest::Remote), with these differences
/// for a virtual device: all attributes are optional, and a team link may follow `@` directly, without a pace.
pub(super) fn parse_cluster_device(word: &str) -> Result<DeviceAttributes, RequestError> {
    let (name, value) = match word.split_once('=') {
        Some((name, value)) => (name.trim(), Some(value.trim())),
        None => (word.trim(), None),
    };
    let (before_at, after_at) = match value.unwrap_or(name).split_once('@') {
        Some((before, after)) => (before.trim(), Some(after.trim())),
        None => (value.unwrap_or(name), None),
    };
    let (name, budget) = if value.is_some() { (name, Some(before_at)) } else { (before_at, None) };
    let unknown = || RequestError::UnknownDevice { name: name.to_owned() };
    if !name.contains("/virtual:") {
        let device = parse_device(word.split('=').next().unwrap_or(word).trim(), value)?;
        let is_in_cluster = matches!(device, DeviceRequest::Remote { .. }) && !device.is_paper();
        return if is_in_cluster { device.attributes() } else { Err(unknown()) };
    }
    let team_link = after_at.and_then(LinkRequest::parse);
    let pace = after_at.filter(|_| team_link.is_none());
    // The budget that the parser requires is filled in, and removed again below.
    let complete = [budget.unwrap_or("100%"), pace.map_or("", |_| "@"), pace.unwrap_or("")].concat();
    let parsed = parse_device(name, Some(&complete))?.attributes()?;
    Ok(DeviceAttributes {
        budget: parsed.budget.filter(|_| budget.is_some()),
        pace: parsed.pace.filter(|_| pace.is_some()),
        team_link: team_link.or(parsed.team_link),
        ..parsed
    })
}

/// Parses a device from its name and the text after `=`; `value` is `None` if the device has no `=`.
fn parse_device(name: &str, value: Option<&str>) -> Result<DeviceRequest, RequestError> {
    if name.len() > MAX_NAME_BYTES {
        return Err(RequestError::LongName { device: name.to_owned(), max_bytes: MAX_NAME_BYTES });
    }
    let unknown = || RequestError::UnknownDevice { name: name.to_owned() };
    let budget = |text: &str| parse_budget(name, text);
    if let Some((host, own_name)) = split_machine(name) {
        return parse_remote(name, host, own_name, value);
    }
    let word = name.to_ascii_lowercase();
    if word == "cpu" {
        return Ok(DeviceRequest::Cpu { budget: value.map(budget).transpose()? });
    }
    if word == "cuda" {
        return Ok(DeviceRequest::Cuda { index: None, budget: value.map(budget).transpose()? });
    }
    if let Some(index) = word.strip_prefix("cuda:") {
        // Rust parses `+1` and `01` as numbers, but they are not device names.
        let index: u32 = index.parse().ok().filter(|number: &u32| number.to_string() == index).ok_or_else(unknown)?;
        return Ok(DeviceRequest::Cuda { index: Some(index), budget: value.map(budget).transpose()? });
    }
    if let Some(own_name) = name.strip_prefix("virtual:") {
        return parse_virtual(name, own_name, value);
    }
    let (name, value, team_link) = split_team_link(name, value);
    let team_link = || team_link.map(|text| parse_link(name, text)).transpose();
    if let Some(known) = paper::table_name(name) {
        let budget = value.map(budget).transpose()?;
        return Ok(DeviceRequest::Paper { name: known.to_owned(), figures: None, budget, team_link: team_link()? });
    }
    if name.strip_prefix(paper::CARD_PREFIX).is_some_and(is_own_name) {
        let budget = budget(value.ok_or_else(|| RequestError::MissingBudget { device: name.to_owned() })?)?;
        let (figures, team_link) = (Some(CardFigures::default()), team_link()?);
        return Ok(DeviceRequest::Paper { name: name.to_owned(), figures, budget: Some(budget), team_link });
    }
    Err(unknown())
}

/// Returns whether a text may be the `NAME` that a user invents in `card:NAME` or `virtual:NAME`: ASCII letters,
/// digits, hyphens and underscores.
fn is_own_name(text: &str) -> bool {
    !text.is_empty() && text.chars().all(|c| c.is_ascii_alphanumeric() || c == '-' || c == '_')
}

/// Parses a device of another host. `name` is the whole name, `own_name` its part after the slash.
fn parse_remote(name: &str, host: &str, own_name: &str, value: Option<&str>) -> Result<DeviceRequest, RequestError> {
    let unknown = || RequestError::UnknownDevice { name: name.to_owned() };
    if host.is_empty() || !host.chars().all(|c| c.is_ascii_alphanumeric() || ".-_".contains(c)) {
        return Err(unknown());
    }
    let (own_name, value, team_link) = match own_name.starts_with("virtual:") {
        true => (own_name, value, None),
        false => split_team_link(own_name, value),
    };
    let team_link = team_link.map(|text| parse_link(name, text)).transpose()?;
    match parse_device(own_name, value) {
        // A remote GPU needs its index.
        Ok(DeviceRequest::Cuda { index: None, .. } | DeviceRequest::Remote { .. }) => Err(unknown()),
        Ok(device) => Ok(DeviceRequest::Remote { host: host.to_owned(), device: Box::new(device), team_link }),
        Err(RequestError::MissingBudget { .. }) if own_name.starts_with("virtual:") => {
            Err(RequestError::ClusterDevice { device: name.to_owned() })
        }
        Err(RequestError::UnknownDevice { .. }) => Err(unknown()),
        Err(error) => Err(error),
    }
}

/// Parses a virtual device. `name` is the whole name, `own_name` its part after `virtual:`.
fn parse_virtual(name: &str, own_name: &str, value: Option<&str>) -> Result<DeviceRequest, RequestError> {
    if !is_own_name(own_name) {
        return Err(RequestError::UnknownDevice { name: name.to_owned() });
    }
    let value = value.ok_or_else(|| RequestError::MissingBudget { device: name.to_owned() })?;
    let (value, links) = value.split_once(':').unwrap_or((value, ""));
    let (host_link, team_link) = links.split_once(':').unwrap_or((links, ""));
    // An empty text between two colons is the default link.
    let optional_link = |text: &str| if text.trim().is_empty() { Ok(None) } else { parse_link(name, text).map(Some) };
    let (link, team_link) = (optional_link(host_link)?, optional_link(team_link)?);
    let (budget, pace) = value.split_once('@').unwrap_or((value, "1.0"));
    let (budget, pace) = (budget.trim(), pace.trim());
    let invalid_pace = || RequestError::InvalidPace { device: name.to_owned(), pace: pace.to_owned() };
    let cores: f64 = pace.parse().map_err(|_| invalid_pace())?;
    if !(cores >= MIN_PACE && cores.is_finite()) {
        return Err(invalid_pace());
    }
    let budget = parse_budget(name, budget)?;
    Ok(DeviceRequest::Virtual { name: own_name.to_owned(), budget, pace: cores, link, team_link })
}

/// Splits the team link (after `@`) off a device's name or value. Returns the name, the value, and the text of the
/// link. The link is `None` if there is no `@`.
fn split_team_link<'a>(name: &'a str, value: Option<&'a str>) -> (&'a str, Option<&'a str>, Option<&'a str>) {
    let (head, team_link) = match value.unwrap_or(name).split_once('@') {
        Some((head, text)) => (head.trim(), Some(text)),
        None => (value.unwrap_or(name), None),
    };
    let (name, value) = if value.is_some() { (name, Some(head)) } else { (head, None) };
    (name, value, team_link)
}

/// Parses the link in `text`. `device` is the name of the device, for the error.
fn parse_link(device: &str, text: &str) -> Result<LinkRequest, RequestError> {
    let invalid = || RequestError::InvalidLink { device: device.to_owned(), link: text.trim().to_owned() };
    LinkRequest::parse(text).ok_or_else(invalid)
}
