"""List the ways to express one field of a record: as a predicate of its subject, or as words before or after the
sentence."""

PREDICATES: dict[str, dict[str, str]] = {
    "person": {
        "age": "is {v} years old|is {v}|is aged {v}|turned {v} in spring|is {v} years young|has just become {v}",
        "city": "lives in {v}|comes from {v}|is at home in {v}|grew up in {v}|moved to {v}|stays in {v}|has a house in {v}",
        "job": "works as a {v}|is a {v}|has a job as a {v}|earns money as a {v}|is employed as a {v}|became a {v}",
        "hobby": "likes {v}|loves {v}|enjoys {v}|is fond of {v}|spends weekends on {v}|does a lot of {v}|has {v} as a hobby",
    },
    "product": {
        "color": "is {v}|comes in {v}|has the color {v}|is painted {v}|is available in {v}|looks {v}",
        "price": "costs {v} dollars|is sold for {v} dollars|has a price of {v} dollars|sells at {v} dollars|is yours for {v} dollars",
        "stock": "is in stock {v} times|has a stock of {v}|is there {v} times|can be had {v} times",
        "brand": "is made by {v}|is from {v}|comes from {v}|is sold by {v}|carries the brand {v}|is a product of {v}",
    },
    "event": {
        "date": "is on {v}|takes place on {v}|happens on {v}|is planned for {v}|will be held on {v}",
        "time": "starts at {v}|begins at {v}|opens at {v}|is at {v}|goes off at {v}",
        "place": "is in {v}|takes place in {v}|is held in {v}|comes to {v}|happens in {v}",
        "guests": "has {v} guests|welcomes {v} guests|expects {v} guests|is for {v} guests|is open to {v} guests",
    },
    "trip": {
        "origin": "leaves {v}|starts in {v}|sets off from {v}|departs from {v}|says goodbye to {v}",
        "destination": "goes to {v}|travels to {v}|arrives in {v}|wants to reach {v}|is on the way to {v}|heads for {v}",
        "day": "travels on {v}|has a ticket for {v}|is on the road on {v}|leaves home on {v}",
        "transport": "takes the {v}|goes by {v}|sits in the {v}|uses the {v}|travels by {v}",
    },
    "pet": {
        "species": "is a {v}|is a cute {v}|is the best {v}|was born a {v}|is our {v}",
        "age": "is {v} years old|is {v}|has lived for {v} years|is aged {v}",
        "owner": "belongs to {v}|is the pet of {v}|lives with {v}|is loved by {v}|is owned by {v}",
        "color": "is {v}|has {v} fur|looks {v}|is all {v}",
    },
    "book": {
        "author": "was written by {v}|is by {v}|is a book by {v}|is the work of {v}|comes from the pen of {v}",
        "year": "came out in {v}|was published in {v}|appeared in {v}|is from {v}|was printed in {v}",
        "pages": "has {v} pages|is {v} pages long|fills {v} pages|runs to {v} pages",
    },
    "contact": {
        "email": "has the email {v}|can be reached at {v}|uses the address {v}|writes from {v}|reads mail at {v}",
        "phone": "has the number {v}|can be called at {v}|answers the phone at {v}|has the phone {v}",
        "company": "works at {v}|works for {v}|is with {v}|is employed by {v}|has a desk at {v}",
    },
    "order": {
        "order_id": "placed order {v}|has the order number {v}|asks about order {v}|wrote about order {v}",
        "item": "ordered the {v}|wants the {v}|bought the {v}|chose the {v}|needs the {v}",
        "quantity": "wants {v} pieces|ordered {v} pieces|takes {v} of them|needs {v} of them",
        "total": "paid {v} dollars|spent {v} dollars|owes {v} dollars|sent {v} dollars|gets a bill of {v} dollars",
        "city": "lives in {v}|has an address in {v}|gets it sent to {v}|orders from {v}",
    },
}
"""By record and field, with {v} for the value and `|` between the ways."""

FRONTS: dict[str, dict[str, str]] = {
    "person": {
        "age": "At {v}|At the age of {v}|Aged {v}|Now {v}|With {v} years behind them",
        "city": "In {v}|Back in {v}|From {v}|Here in {v}|Over in {v}",
        "job": "As a {v}|A {v}|Once a {v}|By trade a {v}",
        "hobby": "With {v} as a hobby|A fan of {v}|In love with {v}|Mad about {v}",
    },
    "product": {
        "color": "In {v}|Painted {v}|All in {v}",
        "price": "For {v} dollars|At {v} dollars|For only {v} dollars|At a price of {v} dollars",
        "stock": "With {v} in stock|With {v} left|Only {v} left",
        "brand": "Made by {v}|By {v}|From {v}|Fresh from {v}",
    },
    "event": {
        "date": "On {v}|As planned on {v}|Again on {v}",
        "time": "At {v}|From {v} on|As early as {v}",
        "place": "In {v}|Right in {v}|Over in {v}",
        "guests": "With {v} guests|For {v} guests|Before {v} guests",
    },
    "trip": {
        "origin": "From {v}|Starting in {v}|Out of {v}",
        "destination": "On the way to {v}|Towards {v}|To {v}",
        "day": "On {v}|Early on {v}|Late on {v}|This {v}",
        "transport": "By {v}|With the {v}|On board a {v}",
    },
    "pet": {
        "species": "As a {v}|A {v}|Being a {v}",
        "age": "At {v}|Aged {v}|After {v} years",
        "owner": "At the house of {v}|With {v}|Thanks to {v}|Raised by {v}",
        "color": "In {v}|All {v}|Of {v} color",
    },
    "book": {
        "author": "By {v}|Written by {v}|From the hand of {v}",
        "year": "In {v}|Printed in {v}|Back in {v}|As early as {v}",
        "pages": "With {v} pages|On {v} pages|With all of its {v} pages",
    },
    "contact": {
        "email": "At {v}|By email under {v}|Under the address {v}",
        "phone": "Under {v}|By phone at {v}|Under the number {v}",
        "company": "At {v}|For {v}|Here at {v}",
    },
    "order": {
        "order_id": "In order {v}|With order {v}|Under number {v}",
        "item": "For the {v}|For a {v}|Looking for the {v}",
        "quantity": "For {v} pieces|For {v} of them",
        "total": "For {v} dollars|With {v} dollars|For a total of {v} dollars",
        "city": "In {v}|From {v}|Over in {v}",
    },
}
"""By record and field: set before the sentence, or in lower case after it."""

HERO_PREDICATES = {
    "class": "is a {v}|fights as a {v}|trained as a {v}|is known as a {v}|became a {v}|has the class {v}|lives as a {v}|was born a {v}",
    "level": "is level {v}|is at level {v}|has reached level {v}|stands at level {v}|is of level {v}|made it to level {v}",
    "hp": "has {v} hp|has {v} hit points|starts with {v} hp|is left with {v} hp|can take {v} hp",
    "items": "carries {v}|owns {v}|holds {v}|has {v}|is equipped with {v}|travels with {v}|brings {v}|found {v}|fights with {v}|uses {v}",
}
HERO_FRONTS = {
    "class": "As a {v}|A {v}|By class a {v}",
    "level": "At level {v}|On level {v}|Since level {v}",
    "hp": "With {v} hp|With {v} hit points|On {v} hp",
    "items": "With {v}|Holding {v}|Equipped with {v}|Thanks to {v}",
}
